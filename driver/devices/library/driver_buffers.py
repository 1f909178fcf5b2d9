"""Memory of a driver in a shared library: buffers that it allocates, and memory of its own kinds that it maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from burst import GeneralFailure, ResourceExhaustedPersistent, ResourceExhaustedTransient
from driver.devices.library.table import ffi
from driver.interface import DriverBuffer
from driver.nn import Operand
from driver.protocol.model_codec import operand_code

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from driver.devices.library.loaded import LoadedDriver
    from driver.interface import BufferRequest, MemoryHandle, PreparedModel

_MOST_BYTES = 1 << 47  # what can be mapped at all


class LibraryBuffer(DriverBuffer):
    """A `burst_buffer` of the driver's."""

    def __init__(self, driver: LoadedDriver, pointer: Any, nbytes: int, value_bytes: int) -> None:
        """`nbytes`: that it occupies. `value_bytes`: of its value in the HAL's layout."""
        self._driver, self.pointer, self.nbytes, self.value_bytes = driver, pointer, nbytes, value_bytes
        self._host: Any = ffi.NULL
        if driver.has("host_memory"):
            with driver.watched("host_memory"):
                self._host = driver.table.host_memory(pointer)

    def array(self) -> NDArray[np.uint8] | None:
        if self._host == ffi.NULL:
            return None
        return np.frombuffer(ffi.buffer(self._host, self.value_bytes), np.uint8)

    def copy_from(self, source: NDArray[np.uint8]) -> None:
        place = ffi.cast("void *", source.ctypes.data)
        self._driver.call("copy_from", self.pointer, place, source.nbytes)

    def copy_to(self, target: NDArray[np.uint8]) -> None:
        place = ffi.cast("void *", target.ctypes.data)
        self._driver.call("copy_to", self.pointer, place, target.nbytes)

    def close(self) -> None:
        self._driver.tell("free_buffer", self.pointer)


def allocated(
    driver: LoadedDriver, request: BufferRequest, prefixes: dict[str, int], prepared_of: Callable[[PreparedModel], Any]
) -> LibraryBuffer | None:
    """Return a buffer for that request; None: the driver has no room for it. Raise StatusError.

    `prepared_of`: the driver's object that a prepared model is.
    """
    dimensions = ffi.new("uint32_t[]", [*request.dimensions, 0])
    roles = ffi.new("burst_role[]", max(1, len(request.roles)))
    for role, use in zip(roles, request.roles, strict=False):
        role.prepared, role.is_input = prepared_of(use.prepared), use.is_input
        role.index, role.frequency = use.io_index, use.frequency
    flat = ffi.new("burst_buffer_description *", {"size": ffi.sizeof("burst_buffer_description")})
    flat.type = operand_code(Operand(request.type), prefixes)
    flat.rank, flat.dimensions, flat.bytes = len(request.dimensions), dimensions, request.nbytes
    flat.n_roles, flat.role_stride, flat.roles = len(request.roles), ffi.sizeof("burst_role"), roles
    place, occupied = ffi.new("burst_buffer **"), ffi.new("uint64_t *")
    try:
        driver.call("allocate", driver.device, flat, place, occupied)
    except (ResourceExhaustedTransient, ResourceExhaustedPersistent):
        return None
    if place[0] == ffi.NULL:
        raise GeneralFailure(f"driver {driver.name!r}: allocate returned BURST_NONE and made nothing")
    nbytes = occupied[0] or request.nbytes
    if nbytes > _MOST_BYTES:
        driver.tell("free_buffer", place[0])
        raise GeneralFailure(f"driver {driver.name!r}: allocate says that {request.nbytes} bytes occupy {nbytes}")
    return LibraryBuffer(driver, place[0], nbytes, request.nbytes)


def mapped(driver: LoadedDriver, handle: MemoryHandle) -> LibraryBuffer:
    """Return the memory of that handle. Raise StatusError."""
    kind = ffi.new("char[]", handle.kind.encode())
    fields = ffi.new("int64_t[]", [*handle.fields, 0])
    flat = ffi.new("burst_handle *", {"size": ffi.sizeof("burst_handle")})
    flat.kind, flat.fd, flat.bytes = kind, handle.fd, handle.nbytes
    flat.n_fields, flat.fields = len(handle.fields), fields
    pointer = driver.made("map_memory", "burst_buffer *", driver.device, flat)
    return LibraryBuffer(driver, pointer, handle.nbytes, handle.nbytes)
