"""Buffers of compiled models in shared memory, where several devices are behind their roles, or none allocates.

They keep the rules of a device's own buffers: the engine's code holds them to these, in this process. A request reaches
a device with memory in the place of the buffer. In the same way the CPU executes a request that a device failed on its
own buffers: their values are copied to shared memory, and the outputs back.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from burst import (
    BuffersLost,
    DeviceBuffer,
    ErrorStatus,
    Memory,
    OutputShape,
    PeerDied,
    Result,
    StatusError,
)
from burst.memory import VendorMemory
from driver.client.device_buffers import Buffer, RemoteBuffer, closed
from driver.client.executor import PLAIN, BurstParts, Forwarding
from driver.client.job import perform_with_room
from driver.engine.device_memory import ManagedBuffer, OperandRole
from driver.engine.named_buffers import NamedBuffers
from driver.runtime.launched import launch_here
from driver.runtime.local_executor import WAITING_JOBS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from burst import Request
    from driver.client.completion import Completion
    from driver.client.connection import Connection
    from driver.client.executor import Executor
    from driver.client.fenced import FencedExecution
    from driver.client.job import Job
    from driver.client.surface import AnyBurst
    from driver.nn import Model
    from driver.options import Options
    from driver.protocol.buffers import BufferKind, BufferState


class _SharedMemory:
    """The memory that a buffer lies in: new memory whenever it grows."""

    def __init__(self) -> None:
        self.memory: Memory

    def room(self, nbytes: int) -> NDArray[np.uint8]:
        """Return new memory. Raise ResourceExhaustedPersistent."""
        self.memory = Memory.create(max(1, nbytes))
        return self.memory.asarray(np.uint8, nbytes)


class _ManagedHere(ManagedBuffer):
    """A buffer that this process manages."""

    def __init__(self, kind: BufferKind, dimensions: tuple[int, ...], roles: frozenset[OperandRole]) -> None:
        super().__init__(kind, dimensions, roles, _SharedMemory())

    @property
    def pool(self) -> Memory:
        return cast("_SharedMemory", self._quota).memory


class SharedBuffer(Buffer):
    """A buffer in shared memory. It outlives its devices, and ends when it is closed, or let go."""

    is_on_device = False

    def __init__(
        self, kind: BufferKind, dimensions: tuple[int, ...], roles: frozenset[OperandRole], *, in_place: bool = False
    ) -> None:
        """Use `compiled.allocate`. `roles`: by numbers of compiled models. Raise ResourceExhaustedPersistent."""
        self._managed: ManagedBuffer | None = _ManagedHere(kind, dimensions, roles)
        self.kind, self.token, self.in_place = kind, self._managed.token, in_place
        if in_place:
            self._managed.be_in_place(_ManagedHere(kind, dimensions, roles))

    @property
    def managed(self) -> ManagedBuffer:
        """The buffer that is managed here. Raises ValueError when it is closed."""
        if self._managed is None:
            raise closed(self.token)
        return self._managed

    def state(self) -> BufferState:
        return self.managed.state

    def write(self, memory: Memory, dimensions: tuple[int, ...]) -> None:
        self.managed.copy_from(memory, dimensions)

    def read(self, memory: Memory) -> None:
        self.managed.copy_to(memory)

    def another(self) -> Buffer:
        return SharedBuffer(self.kind, self.managed.dimensions, self.managed.roles, in_place=self.in_place)

    def seal(self, memory: Memory) -> bytes:
        return self.managed.seal(memory, os.geteuid())

    def unseal(self, memory: Memory, dimensions: tuple[int, ...], digest: bytes) -> None:
        self.managed.unseal(memory, dimensions, digest, os.geteuid())

    def copied_inside(self, source: Buffer) -> bool:
        if not isinstance(source, SharedBuffer):
            return False
        self.managed.copy(source.managed)
        return True

    def check(self, connection: Connection | None) -> None:
        """Raise ValueError: only compiled models that it was allocated for, and their bursts, take it in requests."""
        del connection
        raise ValueError(
            f"buffer {self.token} was allocated for compiled models; give the request to one of these, or to its burst"
        )

    def close(self) -> None:
        """Let go of its memory. Harmless when done twice."""
        self._managed = None


class ModelRoles(NamedTuple):
    """A model, and the number by which the roles of shared buffers mean it."""

    number: int
    model: Model


class SharedBuffersExecutor(Forwarding):
    """An executor whose jobs may name buffers in shared memory: the one behind it gets memory in their place."""

    def __init__(self, behind: Executor, number: int) -> None:
        """Stand before `behind`. `number`: of the model, in the roles of buffers."""
        super().__init__(behind)
        self._roles = ModelRoles(number, behind.model)

    def perform(self, job: Job) -> Result:
        """Execute the job while the caller waits."""
        return on_memory(self._roles, job, self._behind.perform)

    def start(self, job: Job) -> Completion:
        """Execute it in the background; a job on shared buffers takes a thread of this process."""
        if names_shared(job.request):
            return WAITING_JOBS.submit(partial(self.perform, job))
        return self._behind.start(job)

    def launch(self, job: Job) -> FencedExecution:
        """Launch it; for shared buffers this process waits for the fences."""
        if names_shared(job.request):
            return launch_here(self.model, job, lambda end: self.perform(job.by(end)))
        return self._behind.launch(job)

    def open_burst(self, options: Options, parts: BurstParts = PLAIN) -> AnyBurst:
        """Return a burst behind this, whose `execute` takes such jobs, too."""
        burst = self._behind.open_burst(options, parts)
        burst.on_memory = partial(on_memory, self._roles)
        return burst


def on_memory(its: ModelRoles, job: Job, perform: Callable[[Job], Result]) -> Result:
    """Perform a job with memory in the place of its shared buffers, and note what becomes of their values.

    Raise ValueError for a buffer that is closed, and what `perform` raises.
    """
    request = job.request
    found = {n: pool.managed for n, pool in enumerate(request.pools) if isinstance(pool, SharedBuffer)}
    if not found:
        return perform(job)
    try:
        result = _on_memory(its, job, found, perform)
    except StatusError as error:
        return error.as_result()
    if result.outputs:
        pairs = zip(result.outputs, request.outputs, strict=True)
        outputs: Any = (None if a.pool in found else output for output, a in pairs)
        return result._replace(outputs=tuple(outputs))
    return result


def _on_memory(
    its: ModelRoles, job: Job, found: Mapping[int, ManagedBuffer], perform: Callable[[Job], Result]
) -> Result:
    for argument in job.request.outputs:
        if argument.pool in found and not (argument.has_no_value or found[argument.pool].in_place):
            found[argument.pool].has_value = False  # also if the request is refused
    named = NamedBuffers(job.request, found, its.number)
    named.begin()

    def grown(result: Result) -> Request | None:
        return NamedBuffers(job.request, found, its.number).request if named.grow(result.output_shapes) else None

    result = perform_with_room(perform, job._replace(request=named.request), grown)
    if result.status == ErrorStatus.NONE:
        operands = [its.model.main.operands[i] for i in its.model.main.outputs]
        named.settle(result.output_shapes or [OutputShape(operand.dimensions) for operand in operands])
    return result


class EvacuatedJob:
    """A job on buffers of a device that failed it: their values are in this process, for the CPU."""

    def __init__(self, model: Model, job: Job) -> None:
        """Copy the values. Raise StatusError where an input has none, BuffersLost when the device has died."""
        self._model = ModelRoles(0, model)
        graph, request = model.main, job.request
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
                    self._moved[pool] = here = SharedBuffer(
                        pool.kind, pool.state().described, roles, in_place=pool.in_place
                    )
                    if n in read:
                        here.copy_from(pool)
        except PeerDied as error:
            raise lost(request) from error
        pools = tuple(self._moved.get(pool, pool) if isinstance(pool, RemoteBuffer) else pool for pool in request.pools)
        written = {request.pools[a.pool] for a in request.outputs}
        self._job = job._replace(request=request._replace(pools=pools))
        self._written = written.intersection(self._moved)

    def perform_by(self, cpu: Executor) -> Result:
        """Perform it on the CPU; the outputs are in the device's buffers then. Raise BuffersLost."""
        result = on_memory(self._model, self._job, cpu.perform)
        if result.status == ErrorStatus.NONE:
            try:
                for buffer in self._written:
                    buffer.copy_from(self._moved[buffer])
            except PeerDied as error:
                raise lost(self._job.request) from error
        return result


def names_shared(request: Request) -> bool:
    """Return True if it names buffers in shared memory. Raise ValueError for one that is closed."""
    for pool in request.pools:  # noqa: SIM110 (any(…) takes four times as long, and this is in every request)
        if isinstance(pool, SharedBuffer) and pool.managed:
            return True
    return False


def names_buffers(request: Request) -> bool:
    """Return True if it names buffers of a device."""
    return any(isinstance(pool, DeviceBuffer) for pool in request.pools)


def names_vendor_memory(request: Request) -> bool:
    """Return True if it names memory of a kind that its device alone can use."""
    return any(isinstance(pool, VendorMemory) for pool in request.pools)


def lost(request: Request) -> BuffersLost:
    """Return the error for the buffers that were lost with their device."""
    tokens = ", ".join(str(pool.token) for pool in request.pools if isinstance(pool, DeviceBuffer))
    return BuffersLost(f"the device died, and its buffers {tokens} with it; allocate new ones")
