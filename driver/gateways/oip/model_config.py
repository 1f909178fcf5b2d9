"""config.pbtxt of a Triton model repository: what of it is honoured here, what is not, and what ends it.

Honoured: name, platform and backend (must be of a runtime for these files), version_policy, max_batch_size, input and
output (checked against the model, and labels of classes), instance_group.count, default_model_filename,
dynamic_batching (preferred sizes apart), model_transaction_policy (`driver.gateways.oip.decoupled`). `UNFIT` names what
means another model than the file alone; a model that asks for it is refused. All else is reported and has no effect.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format

from driver.gateways.oip.datatypes import datatype_of
from driver.gateways.oip.decoupled import DecoupledTerms
from driver.gateways.oip.messages import ModelConfig, enum_names
from driver.gateways.refusal import invalid

if TYPE_CHECKING:
    from pathlib import Path

    from driver.nn import Model, Operand
    from driver.nn.tensors import TensorInfo

CONFIG_FILE = "config.pbtxt"
MOST_BYTES = 1 << 20
_HONOURED = {
    *("name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "instance_group"),
    *("dynamic_batching", "default_model_filename", "model_transaction_policy"),
}
UNFIT = {
    *("ensemble_scheduling", "sequence_batching", "batch_input", "batch_output", "model_operations"),
    "model_repository_agents",
}
_UNFIT_OF_TENSORS = "reshape", "is_shape_tensor", "allow_ragged_batch", "is_non_linear_format_io"
_PLATFORMS = {"", "onnxruntime_onnx", "onnxruntime", "onnx", "tflite", "litert", "burst", "openvino"}
_MOST_INSTANCES = 16
_TYPES = enum_names("DataType")


def text_of(path: Path, where: str) -> str:
    """Return the text of a small file; read no more of a larger one. Raise Refusal, which begins with `where`."""
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise invalid(f"{where}: it has more than {MOST_BYTES} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise invalid(f"{where}: it is not UTF-8") from None


class FolderConfig:
    """The configuration of a model: a config.pbtxt, or the defaults."""

    def __init__(self, text: str = "") -> None:
        """Read the configuration. Raise Refusal for what is no configuration, or cannot be kept to."""
        self.message = _parsed(text)
        its = self.message
        self.max_batch_size: int = its.max_batch_size
        self.instances = min(_MOST_INSTANCES, sum(max(1, group.count) for group in its.instance_group) or 2)
        self.file_name = str(its.default_model_filename)
        present = {field.name for field, _ in its.ListFields()}
        if unfit := sorted(present & UNFIT):
            raise invalid(f"{CONFIG_FILE}: {', '.join(unfit)}: this server runs model files as they are; take it out")
        is_decoupled = its.model_transaction_policy.decoupled
        self.stream = DecoupledTerms.of(CONFIG_FILE, its.parameters) if is_decoupled else None
        for word in (its.platform, its.backend):
            if word not in _PLATFORMS:
                raise invalid(f"{CONFIG_FILE}: {word!r:.40} is no platform of .onnx and .tflite files")
        if self.file_name and PurePosixPath(self.file_name).name != self.file_name:
            raise invalid(f"{CONFIG_FILE}: default_model_filename is the name of a file, without folders")
        if self.max_batch_size < 0:
            raise invalid(f"{CONFIG_FILE}: max_batch_size={self.max_batch_size}: 0 or more")
        self.ignored = sorted(present - _HONOURED - ({"parameters"} if self.stream else set()))

    @property
    def batch(self) -> int:
        """Rows that may run together."""
        return max(1, self.max_batch_size) if self.message.HasField("dynamic_batching") else 1

    @property
    def window(self) -> float:
        """Seconds that a request waits for others."""
        return min(60.0, float(self.message.dynamic_batching.max_queue_delay_microseconds) / 1e6)

    def versions(self, found: set[int]) -> set[int]:
        """Return which of the versions in the folder are served; by default the latest."""
        policy = self.message.version_policy
        match policy.WhichOneof("policy_choice"):
            case "all":
                return found
            case "specific":
                return found & set(policy.specific.versions)
            case _:
                return set(sorted(found)[-max(1, policy.latest.num_versions) :])

    def labels(self, folder: Path) -> dict[str, list[str]]:
        """Return the names of classes of each output that has a file of them in the model's folder. Raise Refusal."""
        found = {}
        for each in self.message.output:
            if name := each.label_filename:
                where = f"{CONFIG_FILE}: output {each.name!r:.80}: label_filename {name!r:.80}"
                if PurePosixPath(name).name != name or not (folder / name).is_file():
                    raise invalid(f"{where}: there is no such file in the model's folder")
                found[each.name] = text_of(folder / name, where).splitlines()
        return found

    def check(self, model: Model) -> None:
        """Raise Refusal if the file has other inputs and outputs than the configuration says."""
        main = model.main
        for given, tensors, numbers, word in (
            (self.message.input, model.inputs, main.inputs, "input"),
            (self.message.output, model.outputs, main.outputs, "output"),
        ):
            known = {tensor.name: (tensor, main.operands[n]) for tensor, n in zip(tensors, numbers, strict=True)}
            for each in given:
                if each.name not in known:
                    raise invalid(
                        f"{CONFIG_FILE}: the model has no {word} {each.name!r:.80}; it has {', '.join(known)}"
                    )
                self._check_tensor(each, *known[each.name], f"{CONFIG_FILE}: {word} {each.name!r:.80}")
        if self.stream:
            self.stream.plan(CONFIG_FILE, model)

    def _check_tensor(self, each: Any, tensor: TensorInfo, operand: Operand, where: str) -> None:
        for word in _UNFIT_OF_TENSORS:
            if word in each.DESCRIPTOR.fields_by_name and any(f.name == word for f, _ in each.ListFields()):
                raise invalid(f"{where}: {word} is not supported")
        kind = datatype_of(operand)
        if _TYPES.get(each.data_type) != kind.in_config:
            raise invalid(f"{where} is {_TYPES.get(each.data_type)}, and {kind.in_config} in the file")
        dims = [-1, *each.dims] if self.max_batch_size else list(each.dims)
        sizes = tensor.shape or ()
        fits = not sizes or (
            len(dims) == len(sizes) and all(d == s or -1 in (d, s or -1) for d, s in zip(dims, sizes, strict=True))
        )
        if not fits:
            raise invalid(f"{where} has dims {dims}, and {[s or -1 for s in sizes]} in the file")


@lru_cache(maxsize=128)
def folder_config(text: str) -> FolderConfig:
    """Return the configuration, which is read once: its folder is looked at again and again. Raise Refusal."""
    return FolderConfig(text)


def _parsed(text: str) -> Any:
    """Parse it: fields that are unknown inside of others are passed over; at the top they are an error. Raise
    Refusal.
    """
    try:
        known: Any = text_format.Parse(text, ModelConfig(), allow_unknown_field=True)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise invalid(f"{CONFIG_FILE}: {error!s:.200}") from None
    return known
