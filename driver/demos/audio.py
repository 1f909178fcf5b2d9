"""Hear keypad digits in noise, 20 ms at a time, with a recurrent network in another process: `burst demo audio`.

What the network remembers from block to block stays on the device, in buffers that take turns: what one execution
writes the next one reads, and no byte of it passes through this program. Every block goes to the same device over the
plain RPC path too. This is all that the demo does with the API; where sound comes from is in `audio_sources`, the
network in `listener`, and what becomes of the answers in `audio_report`.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import burst
import driver
from burst import Request, RequestArgument
from driver.demos.keypad import BLOCK
from driver.demos.latencies import timed
from driver.demos.listener import CLASSES, STATES, build_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from driver.demos.audio_sources import Pace, SoundSource
    from driver.demos.latencies import TimedCall

TIMEOUT = 5.0  # seconds for one execution
WARM_UP = 20  # blocks of silence on each path before anything is measured


@dataclass(frozen=True, slots=True)
class BlockResult:
    """One block, and each path's answer: how likely each key is. All of it is shared memory until the next step."""

    index: int
    block: np.ndarray
    answers: dict[str, np.ndarray]  #: by path, the burst's first
    calls: dict[str, TimedCall]  #: by path


@contextmanager
def connected(device: str, priority: Literal["low", "medium", "high"] = "medium", **how: Any) -> Iterator[Listeners]:
    """Yield the network on a device, whose process starts if it is not running. `how`: options of `burst`, such as
    `spin`.
    """
    with (
        driver.connect(device) as remote,
        remote.prepare(build_model(), priority=priority) as prepared,
        prepared.burst(measure=True, **how) as fast,
    ):
        yield Listeners(prepared, fast)


class Listener:
    """The network on one path to the device: a block goes in, an answer comes out, and its memory stays there."""

    def __init__(self, prepared: driver.RemotePreparedModel, execute: Callable[..., burst.Result]) -> None:
        """`execute`: that of the prepared model, which is the plain path, or of a burst on it."""
        self._execute = execute
        self._memory = driver.Memory.create(4 * (BLOCK + CLASSES))
        self.block = self._memory.asarray(np.float32, (BLOCK,))  # to be written in place
        roles = [driver.BufferRole(0, n) for n in (1, 2)]  # a state is input n of the model, and output n
        allocate, desc = prepared.device.allocate, driver.BufferDesc()
        self._states = [[allocate(desc, [prepared], [role], [role]) for role in roles] for _ in range(2)]
        # Two requests that never change: the burst and the device recognise them, and check and bind them only once.
        self._requests = [self._request(*self._states), self._request(*reversed(self._states))]
        self.forget()
        for _ in range(WARM_UP):  # map memory, fill caches
            self.step()
        self.forget()

    def _request(self, old: list[driver.Buffer], new: list[driver.Buffer]) -> Request:
        block, answer = RequestArgument(length=4 * BLOCK), RequestArgument(offset=4 * BLOCK, length=4 * CLASSES)
        *states, one, other = (RequestArgument(pool=n) for n in range(1, 5))  # whole buffers: no offset, no length
        return Request((block, *states), (answer, one, other), (self._memory, *old, *new))

    def forget(self) -> None:
        """Begin as if nothing had ever been heard."""
        for buffer, shape in zip(self._states[0], STATES, strict=True):
            buffer.copy_from(np.zeros(shape, np.float32))
        self._turn = 0

    def step(self) -> tuple[np.ndarray, TimedCall]:
        """Hear the block: how likely each key is, in memory that the next step writes to, and how long it took."""
        result, call = timed(partial(self._execute, self._requests[self._turn], measure=True, timeout=TIMEOUT))
        self._turn = 1 - self._turn
        return result.outputs[0][0], call  # the outputs in buffers are None


class Listeners:
    """A pair of the same network, one on each path, each with a memory of its own."""

    def __init__(self, prepared: driver.RemotePreparedModel, fast: driver.AnyBurst) -> None:
        self.prepared, self._fast = prepared, fast
        paths = {"burst": fast.execute, "plain RPC": prepared.execute}
        self._paths = {path: Listener(prepared, execute) for path, execute in paths.items()}

    def listen(self, source: SoundSource, pace: Pace) -> Iterator[BlockResult]:
        """Take block after block from the source, at this pace, until it has no more."""
        first, *others = self._paths.values()
        index = 0
        while source.read(first.block):
            for other in others:
                other.block[...] = first.block
            pace.wait()
            turns = sorted(self._paths, reverse=index % 2 == 1)  # neither path always comes second
            heard = {path: self._paths[path].step() for path in turns}
            answers = {path: heard[path][0] for path in self._paths}
            yield BlockResult(index, first.block, answers, {path: heard[path][1] for path in self._paths})
            index += 1

    def stats(self) -> dict[str, Any]:
        """Return what the burst counted."""
        return self._fast.stats()
