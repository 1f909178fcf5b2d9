"""Memory domains: buffers that a device manages for its client, as the HAL's `allocate` makes them.

What an execution leaves in such a buffer the next one can read there: no byte of it passes through the client. A buffer
is an input or an output of a request where a `Memory` could be, as a whole:

    state = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 1)], [BufferRole(0, 0)])
    Request(inputs=(RequestArgument(pool=0, length=640), RequestArgument(pool=1)), …, pools=(memory, state))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import BuffersLost, DeviceBuffer, Memory
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from driver.client.connection import Connection


class BufferDesc(NamedTuple):
    """What is wanted of a buffer beyond its roles. `dimensions`: () is as the roles say; 0 where they stay open."""

    dimensions: tuple[int, ...] = ()


class BufferRole(NamedTuple):
    """A use of a buffer: of the prepared model of that index in `allocate`, its input or output `io_index`.

    `frequency`: in which part of all executions it is used so, more than 0 and at most 1.
    """

    model_index: int
    io_index: int
    frequency: float = 1.0


class Buffer(DeviceBuffer, Closing):
    """A buffer on a device, made by `RemoteDevice.allocate`. It is released when it is closed, or let go.

    It belongs to one life of the device: after the device's death, using it raises BuffersLost.
    """

    def __init__(self, connection: Connection, token: int) -> None:
        """Use `device.allocate`."""
        super().__init__(token)
        self._connection, self._is_closed = connection, False

    def check(self, connection: Connection) -> None:
        """Raises BuffersLost, or ValueError, unless it can be used over this connection."""
        if self._is_closed:
            raise ValueError(f"buffer {self.token} is closed; allocate another")
        if connection is not self._connection:
            raise BuffersLost(
                f"buffer {self.token} belongs to a device that died, or to another connection; allocate it there"
            )

    def copy_from(self, source: Memory | NDArray[Any], dimensions: Sequence[int] = ()) -> None:
        """Makes all of `source` its value. An array says its own dimensions where they are open.

        Raises StatusError (INVALID_ARGUMENT where bytes or dimensions do not fit: then it has no value), PeerDied.
        """
        memory, given = source, tuple(dimensions)
        if not isinstance(memory, Memory):
            array = np.ascontiguousarray(source)
            memory, given = Memory.create(max(1, array.nbytes)), given or array.shape
            memory.asarray(np.uint8, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
        self._call("copy_from", self.token, list(given), memory=memory)

    def copy_to(self, target: Memory | NDArray[Any]) -> None:
        """Writes its value to all of `target`.

        Raises StatusError (INVALID_ARGUMENT where the sizes differ, GENERAL_FAILURE when it has no value), PeerDied.
        """
        if isinstance(target, Memory):
            self._call("copy_to", self.token, memory=target)
            return
        memory = Memory.create(max(1, target.nbytes))
        self._call("copy_to", self.token, memory=memory)
        target[...] = memory.asarray(target.dtype, target.shape)

    def _call(self, method: str, *arguments: object, memory: Memory) -> None:
        self.check(self._connection)
        self._connection.call(method, *arguments, memory.to_wire(), fds=[memory.fd])

    def close(self) -> None:
        """Frees its memory on the device. Harmless when done twice, and when the device is gone."""
        if not self._is_closed:
            self._is_closed = True
            self._connection.release(self.token)

    def __del__(self) -> None:
        self.close()


def check_buffers(pools: Sequence[object], connection: Connection) -> None:
    """Raises BuffersLost, ValueError for a buffer among `pools` that cannot be used there."""
    for pool in pools:
        if isinstance(pool, Buffer):
            pool.check(connection)
