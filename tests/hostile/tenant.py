"""An honest client of a served device, as a process: a command a line on stdin, an answer in JSON on stdout.

python tenant.py ADDRESS

bursts SECONDS    runs ADD back to back: runs, p50 and p99 in seconds
prepares COUNT    prepares so many new models of 200 operations: seconds of each
look              does everything that a client does, once: seconds of each step, or its error
begin             runs ADD all the time from now on, in a thread, and looks at each answer
end               no longer: how many runs, and what was wrong with them
busy SECONDS      runs and prepares as fast as it can, and says nothing until then
identity          pids of service and engine, and how many bursts of this account the device knows
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from enemy import chain, memfd, plus_one
from waiting import until

import driver
from burst import Memory, Request, RequestArgument
from driver.client.device_buffers import BufferDesc, BufferRole

if TYPE_CHECKING:
    from collections.abc import Callable

WITHIN = 15.0  # seconds after which a step counts as stuck
_constants, _pause = count(1), threading.Event()
X = np.ones(4, np.float32)
_MOST_FAULTS = 10


class Tenant:
    """A connection, a model and a burst that stay, and what is made anew."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._device = driver.connect(address)
        self._prepared = self._device.prepare(plus_one(self._device))
        self._burst = self._prepared.burst()
        self._burst.run(X)

    def identity(self) -> dict[str, int]:
        """Whom it talks to, and what is left of its bursts."""
        device = self._device
        return {"service": device.service_pid, "engine": device.engine_pid, "bursts": len(device.traces())}

    def bursts(self, seconds: float) -> dict[str, float]:
        """Back to back."""
        times, end = [], time.monotonic() + seconds
        while (begin := time.monotonic()) < end:
            self._burst.run(X, timeout=WITHIN)
            times.append(time.monotonic() - begin)
        p50, p99 = np.quantile(times, [0.5, 0.99])
        return {"runs": len(times), "p50": float(p50), "p99": float(p99), "max": max(times)}

    def begin(self) -> str:
        """From now on."""
        self._ends, self._seen = threading.Event(), {"runs": 0, "faults": []}
        self._thread = threading.Thread(target=self._run_all_the_time)
        self._thread.start()
        return "begun"

    def end(self) -> dict[str, Any]:
        """Until here."""
        self._ends.set()
        self._thread.join()
        return self._seen

    def _run_all_the_time(self) -> None:
        with self._prepared.burst() as burst:
            while not self._ends.is_set() and len(self._seen["faults"]) < _MOST_FAULTS:
                self._seen["runs"] += 1
                x = X * (self._seen["runs"] % 1000)
                try:
                    if (found := burst.run(x, timeout=WITHIN).outputs[0]).tolist() != (x + 1).tolist():
                        self._seen["faults"].append(f"{x} + 1 is {found}")
                except Exception as error:  # noqa: BLE001 (it is the result)
                    self._seen["faults"].append(f"{type(error).__name__}: {str(error)[:300]}")

    def prepares(self, times: float) -> list[float]:
        """One after another; no device has seen these models before."""
        return [self._timed(self._prepare_new) for _ in range(int(times))]

    def busy(self, seconds: float) -> int:
        """As much work as goes: a new model now and then, bursts between."""
        end, done = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            self._prepare_new()
            for _ in range(300):
                self._burst.run(X, timeout=WITHIN)
                done += 1
        return done

    def _prepare_new(self) -> None:
        constant = float(next(_constants)) + os.getpid() / 2**23
        self._device.prepare(chain(200, constant), deadline=time.monotonic() + WITHIN).close()

    def look(self) -> dict[str, Any]:
        """Each step once."""
        found: dict[str, Any] = {}
        for step in (
            self.connects,
            self.opens,
            self.forgets,
            self.runs,
            self.unmaps,
            self.plain,
            self.guarded,
            self.waits,
            self.fences,
            self.keeps,
            self.probes,
        ):
            try:
                found[step.__name__] = self._timed(step)
            except Exception as error:  # noqa: BLE001 (it is the result)
                found[step.__name__] = f"{type(error).__name__}: {str(error)[:300]}"
        return found

    @staticmethod
    def _timed(step: Callable[[], object]) -> float:
        begin = time.monotonic()
        step()
        return time.monotonic() - begin

    def connects(self) -> None:
        """Another connection, with a model of its own."""
        by = time.monotonic() + WITHIN
        with (
            driver.connect(self._address) as device,
            device.prepare(chain(2, next(_constants)), deadline=by) as prepared,
        ):
            assert prepared.run(X)[0].shape == (4,)

    def opens(self) -> None:
        """Another burst, which ends at once."""
        with self._prepared.burst() as burst:
            assert burst.run(X, timeout=WITHIN).outputs[0].tolist() == [2.0] * 4

    def forgets(self) -> None:
        """The device soon knows only the burst that stays."""
        until(lambda: len(self._device.traces()) <= 1)

    def runs(self) -> None:
        """The burst that stays."""
        assert self._burst.run(X, timeout=WITHIN).outputs[0].tolist() == [2.0] * 4

    def unmaps(self) -> None:
        """The device lets memory go that the burst used, which can be sealed then."""
        fd = memfd(4096, 0)
        try:
            memory = Memory.from_fd(fd, 4096)
            assert self._burst.execute(self._request(memory), timeout=WITHIN).status == 0
            self._device.free_memory(memory)
            del memory
            self._until_sealed(fd)
        finally:
            os.close(fd)

    @staticmethod
    def _until_sealed(fd: int) -> None:
        def is_sealed() -> bool:
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            except OSError as error:
                if error.errno != errno.EBUSY:
                    raise
                return False
            return True

        until(is_sealed)

    def plain(self) -> None:
        """The plain path."""
        assert self._prepared.execute(self._request(Memory.create(4096)), timeout=WITHIN).status == 0

    def guarded(self) -> None:
        """Memory that this process could truncate, which the engine has to guard."""
        fd = memfd(4096, 0)
        try:
            memory = Memory.from_fd(fd, 4096)
        finally:
            os.close(fd)
        assert self._prepared.execute(self._request(memory), timeout=WITHIN).status == 0

    def waits(self) -> None:
        """An asynchronous execution."""
        future = self._prepared.execute_async(self._request(Memory.create(4096)))
        assert future.result(WITHIN).status == 0

    def fences(self) -> None:
        """A fenced execution."""
        with self._prepared.execute_fenced(self._request(Memory.create(4096))) as execution:
            assert execution.result(WITHIN).status == 0

    def probes(self) -> None:
        """What a supervisor does."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(WITHIN)
            sock.connect(str(Path(self._address).parents[1] / "metrics.sock"))
            sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b" 200 " in sock.recv(100)

    def keeps(self) -> None:
        """A buffer on the device."""
        with self._device.allocate(BufferDesc(), [self._prepared], [BufferRole(0, 0)], []) as buffer:
            buffer.copy_from(X)

    @staticmethod
    def _request(memory: Memory) -> Request:
        memory.asarray(np.float32, 4)[:] = 1
        return Request((RequestArgument(length=16),), (RequestArgument(offset=64, length=16),), (memory,))


def main() -> None:
    """Reads commands until the end of its input."""
    tenant = Tenant(sys.argv[1])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = line.split()
        try:
            found = getattr(tenant, name)(*map(float, arguments))
        except Exception as error:  # noqa: BLE001 (it is the answer)
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
