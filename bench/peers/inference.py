"""The Open Inference Protocol over gRPC: what an inference server speaks, in front of LiteRT.

    pip install grpcio protobuf
    python inference.py SOCKET --threads 1 [--cpu 1] --models float32 quant8

A server whose models are MobileNetV1 in the forms of models.py, compiled by LiteRT as the litert device does it. It
prints "ready" once it listens, and ends when its standard input does. `Client` is the other side. Messages have the
fields that are used here, with the protocol's names and numbers; those that are left out would be empty.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

METHOD = "/inference.GRPCInferenceService/ModelInfer"
LIMITS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
DATATYPES = {"f": "FP32", "u": "UINT8", "i": "INT8"}  # by numpy's kind, of the models here

_TEXT, _BYTES, _INTEGER, _MESSAGE = 9, 12, 3, 11  # field types of protobuf
_TENSOR = (("name", 1, _TEXT, ""), ("datatype", 2, _TEXT, ""), ("shape", 3, _INTEGER, "many"))
_HEAD = (("model_name", 1, _TEXT, ""), ("model_version", 2, _TEXT, ""), ("id", 3, _TEXT, ""))
_MESSAGES = {
    "InferTensor": _TENSOR,
    "ModelInferRequest": (*_HEAD, ("inputs", 5, _MESSAGE, "many"), ("raw_input_contents", 7, _BYTES, "many")),
    "ModelInferResponse": (*_HEAD, ("outputs", 5, _MESSAGE, "many"), ("raw_output_contents", 6, _BYTES, "many")),
}


def _classes() -> dict[str, Any]:
    """Protobuf's classes of _MESSAGES. Inputs and outputs have the same fields, so they are one message here."""
    file = descriptor_pb2.FileDescriptorProto(name="inference.proto", package="inference", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, many in fields:
            of = ".inference.InferTensor" if kind == _MESSAGE else None
            message.field.add(name=field, number=number, type=kind, label=3 if many else 1, type_name=of)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"inference.{name}") for name in _MESSAGES)
    return {name: message_factory.GetMessageClass(one) for name, one in zip(_MESSAGES, found, strict=True)}


Tensor, Request, Response = _classes().values()


def described(name: str, array: NDArray[Any]) -> Any:
    """What the protocol says of a tensor besides its contents."""
    return Tensor(name=name, datatype=DATATYPES[array.dtype.kind], shape=array.shape)


class Client:
    """A connection to such a server."""

    def __init__(self, path: Path) -> None:
        self._channel = grpc.insecure_channel(f"unix:{path}", options=LIMITS)
        self._infer = self._channel.unary_unary(METHOD, Request.SerializeToString, Response.FromString)

    def infer(self, model: str, array: NDArray[Any]) -> NDArray[Any]:
        """One request for one array, and the array that came back. Raises grpc.RpcError."""
        request = Request(model_name=model, inputs=[described("image", array)], raw_input_contents=[array.tobytes()])
        response = self._infer(request, timeout=30)
        return np.frombuffer(response.raw_output_contents[0], array.dtype).reshape(response.outputs[0].shape)

    def close(self) -> None:
        """Nothing is left of it."""
        self._channel.close()


def answer(models: dict[str, Any], request: Any, context: grpc.ServicerContext) -> Any:
    """One inference. Ends the call with a status when it asks for what is not there."""
    model = models.get(request.model_name)
    if model is None:
        context.abort(grpc.StatusCode.NOT_FOUND, f"model_name {request.model_name!r}: there are {', '.join(models)}")
    source, result = model.inputs[0], model.outputs[0]
    if request.inputs != [described("image", source)] or [*map(len, request.raw_input_contents)] != [source.nbytes]:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"inputs: one of {source.dtype} {source.shape} is needed")
    source[...] = np.frombuffer(request.raw_input_contents[0], source.dtype).reshape(source.shape)
    if status := model.run():
        context.abort(grpc.StatusCode.INTERNAL, f"LiteRT's status {status}")
    outputs = [described("probabilities", result)]
    return Response(model_name=request.model_name, outputs=outputs, raw_output_contents=[result.tobytes()])


class Service(grpc.GenericRpcHandler):
    """The one method."""

    def __init__(self, infer: Callable[[Any, Any], Any]) -> None:
        self._handler = grpc.unary_unary_rpc_method_handler(infer, Request.FromString, Response.SerializeToString)

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """As gRPC asks for it."""
        return self._handler if details.method == METHOD else None


def main() -> None:
    """Serves until the other end of its standard input is closed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--models", nargs="+", required=True)
    args = parser.parse_args()
    if args.cpu is not None:
        os.sched_setaffinity(0, {args.cpu})
    sys.path.append(str(Path(__file__).parents[1]))
    from litert import InProcess
    from models import mobilenet

    models = {name: InProcess(mobilenet(name), lambda _: args.threads) for name in args.models}
    # One thread: a compiled model runs in one at a time.
    server = grpc.server(futures.ThreadPoolExecutor(1), options=LIMITS)
    server.add_generic_rpc_handlers((Service(lambda request, context: answer(models, request, context)),))
    server.add_insecure_port(f"unix:{args.path}")
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


if __name__ == "__main__":
    main()
