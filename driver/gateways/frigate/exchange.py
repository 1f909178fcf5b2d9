"""The messages of Frigate's `zmq_ipc` detector: a header of JSON, and behind it a frame or the rows found in it.

    frame            header {shape, dtype, model_type}, bytes    ->  header {shape, dtype}, rows
    model question   header {model_request, model_name}          ->  {model_available, model_loaded, …}
    model file       header {model_data, model_name}, bytes      ->  {model_saved, model_loaded, …}

The protocol has no message for an error. Its detector reads zeros, which mean "nothing detected", from every answer
that it does not understand. It does take the shape of an answer from the header, and does not check it. So a refusal
is an answer without rows, of shape (0, 6): it cannot become a detection, and where it is copied to the camera's twenty
rows, numpy raises.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

LONGEST_HEADER = 4096
_LARGEST = 2**31
_SEPARATORS = (",", ":")
_FOUND = b'{"shape":[20,6],"dtype":"float32"}'


class WrongMessage(ValueError):
    """It is none that the protocol has."""


class FrameCall(NamedTuple):
    """A frame to look at. model_type: as Frigate's configuration has it, "" where it is not said."""

    shape: tuple[int, ...]
    dtype: str
    model_type: str


class ModelQuestion(NamedTuple):
    """A question whether the model of that file name is there; with has_file, the model itself."""

    name: str
    has_file: bool


def read_header(header: bytes) -> FrameCall | ModelQuestion:
    """Decode the header of a message. Raise WrongMessage."""
    try:
        said = json.loads(header)
    except (ValueError, RecursionError):
        raise WrongMessage(f"the header is not valid JSON: {bytes(header[:40])!r}") from None
    if not isinstance(said, dict):
        raise WrongMessage(f"the header is not an object: {bytes(header[:40])!r}")
    if said.get("model_request") or said.get("model_data"):
        name = said.get("model_name")
        if not isinstance(name, str):
            raise WrongMessage(f"model_name {name!r:.60} is not a string")
        return ModelQuestion(name, bool(said.get("model_data")))
    return _frame_call(said)


def _frame_call(said: Mapping[str, Any]) -> FrameCall:
    shape, dtype, model_type = said.get("shape"), said.get("dtype"), said.get("model_type", "")
    if not isinstance(shape, list) or not 0 < len(shape) <= 8:
        raise WrongMessage(f"shape {shape!r:.60} is not a list of sizes")
    if not all(type(size) is int and 0 < size < _LARGEST for size in shape) or math.prod(shape) > _LARGEST:
        raise WrongMessage(f"shape {shape!r:.60} has a size that no frame has")
    if not isinstance(dtype, str) or not isinstance(model_type, str):
        raise WrongMessage(f"dtype {dtype!r:.40} and model_type {model_type!r:.40} are not both strings")
    return FrameCall(tuple(shape), dtype, model_type)


def found(rows: NDArray[Any]) -> list[bytes]:
    """Return the answer to a frame."""
    return [_FOUND, rows.tobytes()]


def refusal(reason: str) -> list[bytes]:
    """Return the answer to a frame that was refused."""
    header = {"shape": [0, 6], "dtype": "float32", "error": reason[:1000]}
    return [json.dumps(header, separators=_SEPARATORS).encode(), b""]


def model_answer(question: ModelQuestion, trouble: str) -> list[bytes]:
    """Return the answer to a question for the model. It is loaded, or this server would not listen; files are not
    taken.
    """
    if question.has_file:
        said: dict[str, Any] = {"model_saved": False, "model_loaded": False, "model_name": question.name}
    else:
        said = {"model_available": True, "model_loaded": True, "model_name": question.name}
    if trouble:
        said["error"] = trouble[:1000]
    return [json.dumps(said, separators=_SEPARATORS).encode()]
