"""What the protocol can be asked for, in dicts named as its messages are; both doors call the same methods.

One service is for one account: it has that account's table of shared memory, or none. All share a repository.
"""

from __future__ import annotations

import time
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from driver.gateways.oip.inference import GivenTensor
from driver.gateways.oip.served_model import ModelGone
from driver.gateways.refusal import Refusal, RefusalCode, invalid, not_found

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from driver.gateways.oip.inference import InferAnswer, InferCall
    from driver.gateways.oip.regions import RegionTable
    from driver.gateways.oip.repository import ModelRepository
    from driver.gateways.oip.request_spans import RequestSpans

_MEMORY = "system_shared_memory"
_NO_CUDA = (
    "this server takes system shared memory alone: register_system_shared_memory, or Burst's own client with a "
    "driver.devices.cuda.gpu_pool.GpuPool for values that stay on the GPU"
)
_EXTENSIONS = (
    *("binary_tensor_data", "classification", "model_configuration"),
    *("model_repository", "schedule_policy", "statistics"),
)


class InferenceService:
    """The methods of the protocol for one account. Any thread. All raise Refusal."""

    def __init__(
        self,
        repository: ModelRepository,
        regions: RegionTable | None,
        *,
        may_manage: bool = True,
        spans: RequestSpans | None = None,
    ) -> None:
        """`regions`: None where shared memory is off. `may_manage`: clients may load and unload models. `spans`: None
        where requests are not traced.
        """
        self.repository, self.regions, self._may_manage, self._spans = repository, regions, may_manage, spans

    @property
    def is_traced(self) -> bool:
        """True if requests to infer are noted as spans."""
        return self._spans is not None

    # ---- health and metadata

    def server_live(self) -> dict[str, Any]:
        return {"live": True}

    def server_ready(self) -> dict[str, Any]:
        return {"ready": self.repository.is_ready}

    def model_ready(self, name: str, version: str = "") -> dict[str, Any]:
        try:
            self.repository.get(name, version)
        except Refusal:
            return {"ready": False}
        return {"ready": True}

    def server_metadata(self) -> dict[str, Any]:
        extensions = [*_EXTENSIONS, *([_MEMORY] if self.regions else [])]
        return {"name": "burst", "version": _version(), "extensions": sorted(extensions)}

    def model_metadata(self, name: str, version: str = "") -> dict[str, Any]:
        model = self.repository.get(name, version)
        platform = f"burst_{model.kind}"
        return {"name": name, "versions": self.repository.versions(name), "platform": platform, **model.tensors()}

    def model_config(self, name: str, version: str = "") -> Any:
        """Return the message ModelConfig, from the folder's configuration or from the file."""
        model = self.repository.get(name, version)
        config = type(model.config.message)()
        config.CopyFrom(model.config.message)
        config.name, config.platform, config.backend = name, f"burst_{model.kind}", "burst"
        skipped = 1 if config.max_batch_size else 0
        for given, ports in ((config.input, model.ports.inputs), (config.output, model.ports.outputs)):
            if not given:
                for port in ports:
                    dims = port.metadata["shape"][skipped:]
                    given.add(name=port.name, data_type=port.kind.in_config, dims=dims)
        return config

    def model_statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        models = self.repository.all()
        if name:
            self.repository.get(name, version)
            models = [each for each in models if each.name == name and version in ("", each.version)]
        return {"model_stats": [each.statistics() for each in models]}

    # ---- inference

    def raw_input(self, name: str, version: str, data: Any) -> GivenTensor:
        """Return the one input of a request without JSON."""
        model = self.repository.get(name, version)
        ports = model.ports.inputs
        if len(ports) != 1:
            raise invalid(f"a request without JSON is for models of one input; model {name!r} has {len(ports)}")
        shape = ports[0].raw_shape(len(data), is_batched=bool(model.config.max_batch_size))
        return GivenTensor(ports[0].name, ports[0].kind.name, shape, data)

    def infer(self, call: InferCall) -> InferAnswer:
        if self._spans is None:
            return self._infer(call)
        begin = time.monotonic_ns()
        try:
            answer = self._infer(call)
        except Exception as error:
            self._spans.note(call, begin, None, error)
            raise
        self._spans.note(call, begin, answer, None)
        return answer

    def _infer(self, call: InferCall) -> InferAnswer:
        if self.regions is None and call.slices:
            raise _no_memory()
        while True:
            model = self.repository.get(call.model, call.version)
            try:
                return model.infer(call, self.regions)
            except ModelGone:
                if self.repository.get(call.model, call.version) is model:
                    raise

    def answers(self, call: InferCall) -> Generator[InferAnswer, None, None]:
        """Yield the answers to a call of a stream: one, or those of a decoupled model as they come."""
        model = self.repository.get(call.model, call.version)
        if not model.is_decoupled:
            yield self.infer(call)
            return
        begin, last, failure = time.monotonic_ns(), None, None
        try:
            for last in model.answers(call):
                yield last
        except Exception as error:
            failure = error
            raise
        finally:
            if self._spans:
                self._spans.note(call, begin, last, failure)

    # ---- the repository

    def repository_index(self, *, ready: bool = False) -> dict[str, Any]:
        return {"models": self.repository.index(ready=ready)}

    def load(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        self._check_may_manage()
        if parameters:
            raise Refusal(
                RefusalCode.UNIMPLEMENTED,
                "a model is loaded as it is in the folder; parameters (config, file:…) are not taken from clients",
            )
        self.repository.load(name)
        return {}

    def unload(self, name: str) -> dict[str, Any]:
        self._check_may_manage()
        self.repository.unload(name)
        return {}

    def _check_may_manage(self) -> None:
        if not self._may_manage:
            raise Refusal(RefusalCode.UNIMPLEMENTED, "clients of this address may not load and unload models")

    # ---- shared memory

    def region_status(self, name: str = "") -> list[dict[str, Any]]:
        rows = self._memory().status(name)
        return [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.nbytes} for r in rows]

    def register_region(self, name: str, key: str, offset: int, nbytes: int) -> dict[str, Any]:
        self._memory().register(name, key, offset, nbytes)
        return {}

    def unregister_region(self, name: str = "") -> dict[str, Any]:
        self._memory().unregister(name)
        return {}

    # ---- CUDA's: there never is any, and clients that end theirs before they begin are told so

    def cuda_status(self, name: str = "") -> list[dict[str, Any]]:
        if name:
            raise not_found(f"there is no CUDA shared memory region {name!r:.80}: {_NO_CUDA}")
        return []

    def register_cuda(self, name: str) -> dict[str, Any]:
        raise Refusal(RefusalCode.UNIMPLEMENTED, f"CUDA shared memory region {name!r:.80}: {_NO_CUDA}")

    def unregister_cuda(self) -> dict[str, Any]:
        return {}

    def _memory(self) -> RegionTable:
        if self.regions is None:
            raise _no_memory()
        return self.regions


def _no_memory() -> Refusal:
    return Refusal(
        RefusalCode.UNIMPLEMENTED,
        "shared memory is off at this address: use a Unix socket, or start the server with --shared-memory",
    )


@cache
def _version() -> str:
    try:
        return version("burst-engine")
    except PackageNotFoundError:  # run from its sources
        return "0"
