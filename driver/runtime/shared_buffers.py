"""Buffers of compiled models in shared memory, where several devices are behind their roles, or none allocates.

They keep the rules of a device's own buffers: the engine's code holds them to these, in this process. A request reaches
a device with memory in the place of the buffer. In the same way the CPU executes a request that a device failed on its
own buffers: their values are copied to shared memory, and the outputs back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import (
    BuffersLost,
    DeviceBuffer,
    ErrorStatus,
    Memory,
    OutputShape,
    PeerDied,
    Request,
    Result,
    StatusError,
)
from burst.memory import VendorMemory
from driver.client.device_buffers import Buffer, RemoteBuffer, closed
from driver.engine.device_memory import ManagedBuffer, OperandRole
from driver.engine.named_buffers import NamedBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from driver.client.connection import Connection
    from driver.nn import Model
    from driver.protocol.buffers import BufferKind, BufferState


class _SharedMemory:
    """What a buffer lies in: new memory whenever it grows."""

    def __init__(self) -> None:
        self.memory: Memory

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """Raises ResourceExhaustedPersistent."""
        self.memory = Memory.create(max(1, nbytes))
        return self.memory.asarray(np.uint8, nbytes)


class _ManagedHere(ManagedBuffer):
    """A buffer that this process manages."""

    def __init__(self, kind: BufferKind, dimensions: tuple[int, ...], roles: frozenset[OperandRole]) -> None:
        self._place = _SharedMemory()
        super().__init__(kind, dimensions, roles, self._place)

    @property
    def pool(self) -> Memory:
        return self._place.memory


class SharedBuffer(Buffer):
    """A buffer in shared memory. It outlives its devices, and ends when it is closed, or let go."""

    is_on_device = False

    def __init__(self, kind: BufferKind, dimensions: tuple[int, ...], roles: frozenset[OperandRole]) -> None:
        """Use `compiled.allocate`. `roles`: by numbers of compiled models. Raises ResourceExhaustedPersistent."""
        self._managed: ManagedBuffer | None = _ManagedHere(kind, dimensions, roles)
        self.kind, self.token = kind, self._managed.token

    @property
    def managed(self) -> ManagedBuffer:
        """Raises ValueError when it is closed."""
        if self._managed is None:
            raise closed(self.token)
        return self._managed

    def state(self) -> BufferState:
        return self.managed.state

    def write(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        self.managed.copy_from(memory, dimensions)

    def read(self, memory: Memory) -> None:
        self.managed.copy_to(memory)

    def copied_inside(self, source: Buffer) -> bool:
        if not isinstance(source, SharedBuffer):
            return False
        self.managed.copy(source.managed)
        return True

    def check(self, connection: Connection | None) -> None:
        """It is named in requests of the compiled models that it was allocated for, and of their bursts."""
        del connection
        raise ValueError(
            f"buffer {self.token} was allocated for compiled models; give the request to one of these, or to its burst"
        )

    def close(self) -> None:
        """Lets go of its memory. Harmless when done twice."""
        self._managed = None


class ModelRoles(NamedTuple):
    """A model, and the number by which the roles of shared buffers mean it."""

    number: int
    model: Model


def on_memory(its: ModelRoles, request: Request, execute: Callable[[Request], Result]) -> Result:
    """Executes a request with memory in the place of its shared buffers, and notes what becomes of their values.

    Raises ValueError for a buffer that is closed, and what `execute` raises.
    """
    found = {n: pool.managed for n, pool in enumerate(request.pools) if isinstance(pool, SharedBuffer)}
    if not found:
        return execute(request)
    try:
        result = _on_memory(its, request, found, execute)
    except StatusError as error:
        return error.as_result()
    if result.outputs:
        pairs = zip(result.outputs, request.outputs, strict=True)
        outputs: Any = (None if a.pool in found else output for output, a in pairs)
        return result._replace(outputs=tuple(outputs))
    return result


def _on_memory(
    its: ModelRoles, request: Request, found: Mapping[int, ManagedBuffer], execute: Callable[[Request], Result]
) -> Result:
    for argument in request.outputs:
        if argument.pool in found and not argument.has_no_value:
            found[argument.pool].has_value = False  # also if the request is refused
    named = NamedBuffers(request, found, its.number)
    named.begin()
    result = execute(named.request)
    if result.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and named.grow(result.output_shapes):
        named = NamedBuffers(request, found, its.number)
        result = execute(named.request)
    if result.status == ErrorStatus.NONE:
        operands = [its.model.main.operands[i] for i in its.model.main.outputs]
        named.settle(result.output_shapes or [OutputShape(operand.dimensions) for operand in operands])
    return result


class Evacuated:
    """A request on buffers of a device that failed it: their values are in this process, for the CPU."""

    def __init__(self, model: Model, request: Request) -> None:
        """Raises StatusError where an input has no value, BuffersLost when the device has died."""
        self._model = ModelRoles(0, model)
        graph = model.main
        roles = frozenset(
            OperandRole(0, is_input, n)
            for is_input, operands in ((True, graph.inputs), (False, graph.outputs))
            for n in range(len(operands))
        )
        self._moved: dict[RemoteBuffer, SharedBuffer] = {}
        read = {a.pool for a in request.inputs if not a.has_no_value}
        try:
            for n, pool in enumerate(request.pools):
                if isinstance(pool, RemoteBuffer) and pool not in self._moved:
                    self._moved[pool] = here = SharedBuffer(pool.kind, pool.state().described, roles)
                    if n in read:
                        here.copy_from(pool)
        except PeerDied as error:
            raise lost(request) from error
        pools = tuple(self._moved.get(pool, pool) if isinstance(pool, RemoteBuffer) else pool for pool in request.pools)
        written = {request.pools[a.pool] for a in request.outputs}
        self._request, self._written = request._replace(pools=pools), written.intersection(self._moved)

    def executed(self, execute: Callable[[Request], Result]) -> Result:
        """What the CPU makes of it; the outputs are in the device's buffers then. Raises BuffersLost."""
        result = on_memory(self._model, self._request, execute)
        if result.status == ErrorStatus.NONE:
            try:
                for buffer in self._written:
                    buffer.copy_from(self._moved[buffer])
            except PeerDied as error:
                raise lost(self._request) from error
        return result


def names_shared(request: Request) -> bool:
    """Whether it names buffers in shared memory. Raises ValueError for one that is closed."""
    return any(isinstance(pool, SharedBuffer) and bool(pool.managed) for pool in request.pools)


def names_buffers(request: Request) -> bool:
    """Whether it names buffers of a device."""
    return any(isinstance(pool, DeviceBuffer) for pool in request.pools)


def names_vendor_memory(request: Request) -> bool:
    """Whether it names memory of a kind that its device alone can use."""
    return any(isinstance(pool, VendorMemory) for pool in request.pools)


def lost(request: Request) -> BuffersLost:
    """After the device's death."""
    tokens = ", ".join(str(pool.token) for pool in request.pools if isinstance(pool, DeviceBuffer))
    return BuffersLost(f"the device died, and its buffers {tokens} with it; allocate new ones")
