"""A burst on a prepared model, in arrays: write the inputs in place, run, read the outputs in place."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

from burst import Controller, ErrorStatus, GeneralFailure, NotSent, Request, Result
from driver.workspace import Workspace, is_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from burst import Memory
    from burst.wire import ResultPacket
    from driver.remote import RemotePreparedModel
    from fmq.region import Kind


class Burst:
    """A run of executions in quick succession. One thread at a time.

    `inputs` are arrays in shared memory: what is written there is what the device reads, without a copy. The `outputs`
    of a result are arrays in shared memory too: they hold until the next `run`, so copy what must outlive it.
    """

    def __init__(
        self,
        prepared: RemotePreparedModel,
        *,
        spin: float,
        memory: Kind,
        measure: bool,
        input_shapes: Sequence[tuple[int, ...] | None] | None,
    ) -> None:
        """Use `prepared.burst()`."""
        self._prepared, self._measure = prepared, measure
        self._closed = False
        self._plain = self._copied = self._total = self._device = self._driver = 0
        self._workspace = Workspace(prepared.model, self._shapes(input_shapes))
        self._controller = Controller(prepared.configure_burst(spin), memory, spin)
        self._encode()

    def _shapes(self, given: Sequence[tuple[int, ...] | None] | None) -> Sequence[tuple[int, ...] | None]:
        operands = [self._prepared.model.main.operands[i] for i in self._prepared.model.main.inputs]
        if given is not None:
            return given
        for n, operand in enumerate(operands):
            if not is_known(operand):
                raise ValueError(
                    f"input {n} has the open shape {operand.dimensions}; say it with burst(input_shapes=…)"
                )
        return [operand.dimensions for operand in operands]

    def _encode(self) -> None:
        """After each change of the workspace's memory."""
        self.inputs = self._workspace.inputs
        self._packet = self._controller.encode(self._workspace.request, measure=self._measure)
        self._last: tuple[Any, tuple[NDArray[Any], ...]] = None, ()

    def run(self, *arrays: ArrayLike | None, timeout: float | None = None) -> Result:
        """Executes once; with arrays, copies them into the inputs first.

        Raises ValueError for a wrong dtype or shape (nothing was sent), StatusError, PeerDied, Busy, and Timeout when
        the result does not come in `timeout` seconds: the burst stays usable, and a late result is dropped.
        """
        if arrays:
            self._copied += self._workspace.fill(arrays)
        if self._measure:
            return self._run_measured(timeout)
        return self._run(timeout)

    def _run(self, timeout: float | None) -> Result:
        try:
            reply = self._controller.send(self._packet, timeout)
        except NotSent:
            self._check()
            return self._run_plain(timeout)
        except GeneralFailure:
            self._check()
            raise
        return self._result(reply)

    def _run_measured(self, timeout: float | None) -> Result:
        begin = time.monotonic_ns()
        result = self._run(timeout)
        self._total += time.monotonic_ns() - begin
        self._device += result.timing.time_on_device or 0
        self._driver += result.timing.time_in_driver or 0
        return result

    def _result(self, reply: ResultPacket) -> Result:
        last, outputs = self._last
        if reply.status == 0 and last == reply.output_shapes:
            return Result(reply.status, outputs, reply.output_shapes, reply.timing)
        if reply.status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and (old := self._workspace.grow(reply.output_shapes)):
            self._encode()
            self._controller.free_memory(old)
            return self._result(self._controller.send(self._packet))  # once more, with memory that suffices
        result = Result(reply.status, (), reply.output_shapes, reply.timing)
        result.raise_for_status()
        result.outputs = self._prepared.outputs(self._workspace.request, reply.output_shapes)
        self._last = reply.output_shapes, result.outputs
        return result

    def _run_plain(self, timeout: float | None) -> Result:
        self._plain += 1
        result = self._prepared.execute(self._workspace.request, measure=self._measure, timeout=timeout)
        result.raise_for_status()
        return result

    def execute(self, request: Request, measure: bool = False, timeout: float | None = None) -> Result:
        """An explicit request on pools of your own, with any status. Raises PeerDied, Timeout, Busy."""
        try:
            reply = self._controller.send(self._controller.encode(request, measure=measure), timeout)
        except NotSent:
            self._check()
            self._plain += 1
            return self._prepared.execute(request, measure=measure, timeout=timeout)
        outputs = self._prepared.outputs(request, reply.output_shapes) if reply.status == 0 else ()
        return Result(reply.status, outputs, reply.output_shapes, reply.timing)

    def _check(self) -> None:
        """Before the plain path is taken instead: the burst is still ours. Raises ValueError, DriverError."""
        self._prepared.device.check_process()
        if self._closed:
            raise ValueError("this burst is closed; open another")

    def free_memory(self, memory: Memory) -> None:
        """The device may unmap a pool of `execute`. Unknown memory is no error."""
        self._controller.free_memory(memory)

    def stats(self) -> dict[str, Any]:
        """Counts since the beginning, and where the time went.

        runs: by the path they took. copied_bytes: bulk data, which is what `run(*arrays)` copied for its
        caller (arrays in `inputs` are not copied), and packets.
        seconds, if the burst measures: in all, in the driver, and of that on the device.
        """
        counts = self._controller.counts
        seconds = {"total": self._total / 1e9, "in_driver": self._driver / 1e6, "on_device": self._device / 1e6}
        return {
            "runs": {"burst": self._controller.trace.page.client.results, "plain": self._plain},
            "timeouts": counts.timeouts,
            "memories_sent": counts.memories_sent,
            "copied_bytes": {"bulk": self._copied, "control": self._controller.control_bytes},
            "seconds": seconds if self._measure else None,
        }

    def close(self) -> None:
        """Ends the burst on both sides. Arrays stay readable."""
        self._closed = True
        self._controller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
