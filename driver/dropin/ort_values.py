"""OrtValues and IOBindings of sessions in a device: memory of the program's, read and written where it lies.

A binding is the real class's own, of the session whose weights are not there: it judges names and types. What is bound
is noted, too, and a run reads and writes it. Outputs for which the program gave no memory are values of ONNX Runtime's.
"""

from __future__ import annotations

import ctypes
import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from driver.dropin.not_on_device import NotOnDevice
from driver.formats.onnx_schema import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from driver.dropin.onnx_runs import OnnxRuns

_real: Any = import_module("onnxruntime")
_RealBinding: Any = _real.IOBinding

NUMPY_TYPES: dict[str, Any] = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    **{f"tensor({name})": np.dtype(name).type for name in ("bool", "float16", "int8", "uint8", "int16", "uint16")},
    **{f"tensor({name})": np.dtype(name).type for name in ("int32", "uint32", "int64", "uint64")},
}
"""ONNX Runtime's word for a type -> numpy's type."""


def view_of(value: Any) -> NDArray[Any]:
    """Return the memory of a value as an array. Raise NotOnDevice for one that is no tensor of numbers on the CPU."""
    kind = value.data_type() if value.has_value() else ""
    if kind not in NUMPY_TYPES or value.device_name().lower() != "cpu":
        raise NotOnDevice("a value is no tensor of numbers in the CPU's memory")
    return array_at(value.data_ptr(), value.shape(), np.dtype(NUMPY_TYPES[kind]))


def array_at(address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array on memory that the caller keeps."""
    count = math.prod(shape)
    if not count:
        return np.empty(shape, dtype)
    memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    found: NDArray[Any] = np.frombuffer(memory, dtype).reshape(shape)
    return found


def value_of(array: NDArray[Any]) -> Any:
    """Return a copy of an array as a value whose memory is ONNX Runtime's."""
    value = _real.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type)
    np.copyto(view_of(value), array)
    return value


class BindableSession:
    """A session of ours: what it has is under one name, which no subclass of a program has."""

    _burst_exec: OnnxRuns
    get_providers: Any


class _BareSession:
    """A session as the real binding looks at it."""

    def __init__(self, session: BindableSession) -> None:
        self._sess, self.get_providers = session._burst_exec.bare, session.get_providers


class IOBinding(_RealBinding):  # type: ignore[misc]
    """The memory that a session reads and writes. See `onnxruntime.IOBinding`."""

    def __init__(self, session: Any) -> None:
        """Bind nothing yet."""
        is_bare = isinstance(session, BindableSession) and session._burst_exec.bare is not None
        super().__init__(_BareSession(session) if is_bare else session)
        self.owner = session if is_bare else None  #: a session in a device
        self._feeds: dict[str, NDArray[Any] | None] = {}
        self._targets: dict[str, NDArray[Any] | None] = {}
        self._is_elsewhere = False

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Bind an input to an array."""
        super().bind_cpu_input(name, arr_on_cpu)
        self._feeds[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to memory."""
        super().bind_input(name, device_type, device_id, element_type, shape=shape, buffer_ptr=buffer_ptr)
        self._feeds[name] = self._memory(device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind an input to a value."""
        super().bind_ortvalue_input(name, ortvalue)
        self._feeds[name] = self._view(ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Any = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory, or let ONNX Runtime find some."""
        super().bind_output(name, device_type, device_id, element_type, shape=shape, buffer_ptr=buffer_ptr)
        self._is_elsewhere = self._is_elsewhere or device_type != "cpu"
        is_given = buffer_ptr is not None
        self._targets[name] = self._memory(device_type, element_type, shape, buffer_ptr) if is_given else None

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind an output to a value."""
        super().bind_ortvalue_output(name, ortvalue)
        self._targets[name] = self._view(ortvalue)

    def clear_binding_inputs(self) -> None:
        """Bind no input any more."""
        super().clear_binding_inputs()
        self._feeds.clear()

    def clear_binding_outputs(self) -> None:
        """Bind no output any more."""
        super().clear_binding_outputs()
        self._targets.clear()

    def _memory(self, device: str, element: Any, shape: Sequence[int], address: Any) -> NDArray[Any] | None:
        name = DTYPES.get(element, "") if isinstance(element, int) else np.dtype(element).name
        if device != "cpu" or name in {"", "bfloat16"}:
            self._is_elsewhere = True
            return None
        return array_at(int(address), shape, np.dtype(name))

    def _view(self, value: Any) -> NDArray[Any] | None:
        try:
            return view_of(value)
        except NotOnDevice:
            self._is_elsewhere = True
            return None

    def feeds(self) -> Mapping[str, Any]:
        """Return the arrays that are bound to inputs. Raise NotOnDevice where one is not in the CPU's memory."""
        if self._is_elsewhere:
            raise NotOnDevice("memory of another kind than the CPU's is bound")
        return self._feeds

    @property
    def names(self) -> list[str]:
        """The outputs that are bound."""
        return list(self._targets)

    def settle(self, found: Sequence[Any]) -> bool:
        """Put the results of a run where the outputs are bound. Return False, with nothing done, where one has another
        shape or type than its memory: ONNX Runtime says so in its own words.
        """
        rows = list(zip(self._targets.items(), found, strict=True))
        if any(target is not None and (target.shape, target.dtype) != (a.shape, a.dtype) for (_, target), a in rows):
            return False
        for (name, target), array in rows:
            if target is None:
                super().bind_ortvalue_output(name, value_of(array))
            else:
                np.copyto(target, array)
        return True

    def take(self, other: Any) -> None:
        """Take the outputs of a run of `again`."""
        for name, value in zip(self._targets, other.get_outputs(), strict=True):
            super().bind_ortvalue_output(name, value)

    def again(self, session: Any) -> Any:
        """Return a binding of the same on a session of this process."""
        other = _RealBinding(session)
        for name, value in self._bound_inputs.items():
            if value is not None:
                other.bind_ortvalue_input(name, value)
            elif (array := self._feeds[name]) is not None:
                other.bind_cpu_input(name, array)
        for name, target in self._targets.items():
            value = self._bound_outputs[name]
            if target is None:
                other.bind_output(name)
            elif value is not None:
                other.bind_ortvalue_output(name, value)
            else:
                other.bind_output(name, "cpu", 0, target.dtype.type, shape=target.shape, buffer_ptr=target.ctypes.data)
        return other
