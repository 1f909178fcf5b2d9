"""What kserve's own clients are told by a server, printed as JSON. Run by the Python that has kserve.

python kserve_requests.py HOST:PORT unix:PATH http://HOST:PORT
"""

import asyncio
import json
import sys

import grpc
import httpx
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

X = np.arange(8, dtype=np.float32).reshape(2, 4)


def request(model, *, binary, datatype="FP32"):
    """Two inputs, in binary form or as values."""
    inputs = []
    for name, array in (("x", X), ("y", X + 1)):
        given = InferInput(name, [2, 4], datatype)
        given.set_data_from_numpy(array.astype(np.float16) if datatype == "FP16" else array, binary_data=binary)
        inputs.append(given)
    return InferRequest(model, inputs, request_id="one", parameters={"priority": 1, "mine": "x"})


def told(response):
    (output,) = response.outputs
    return {"id": response.id, "name": output.name, "values": output.as_numpy().tolist()}


async def by_grpc(address):
    async with InferenceGRPCClient(address, timeout=30) as client:
        said = {
            "live": await client.is_server_live(),
            "ready": await client.is_server_ready(),
            "sum": await client.is_model_ready("sum"),
            "nothing": await client.is_model_ready("nothing"),
            "binary": told(await client.infer(request("sum", binary=True))),
            "values": told(await client.infer(request("sum", binary=False))),
            "half": told(await client.infer(request("half", binary=True, datatype="FP16"))),
        }
        for model, datatype in (("nothing", "FP32"), ("sum", "FP16")):
            try:
                await client.infer(request(model, binary=True, datatype=datatype))
            except grpc.RpcError as error:
                said[f"wrong {model}"] = [error.code().name, error.details()]
        return said


async def by_http(address):
    async with InferenceRESTClient(RESTConfig(protocol="v2", timeout=30)) as client:
        said = {
            "live": await client.is_server_live(address),
            "ready": await client.is_server_ready(address),
            "sum": await client.is_model_ready(address, "sum"),
            "nothing": await client.is_model_ready(address, "nothing"),
            "binary": told(await client.infer(address, request("sum", binary=True), "sum")),
            "values": told(await client.infer(address, request("sum", binary=False), "sum")),
        }
        asked = request("half", binary=True, datatype="FP16")
        asked.parameters["binary_data_output"] = True
        said["half"] = told(await client.infer(address, asked, "half"))
        for model, datatype in (("nothing", "FP32"), ("sum", "FP16")):
            try:
                await client.infer(address, request(model, binary=True, datatype=datatype), model)
            except httpx.HTTPStatusError as error:
                said[f"wrong {model}"] = [error.response.status_code, str(error)]
        return said


async def main():
    port, path, http = sys.argv[1:]
    print(json.dumps({"port": await by_grpc(port), "path": await by_grpc(path), "http": await by_http(http)}))


asyncio.run(main())
