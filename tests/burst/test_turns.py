"""Callers who stop waiting, are interrupted or come two at a time: each gets the result of its own request."""

import _thread
import os
import signal
import subprocess
import sys
import threading

import pytest

from burst import Busy, OutputShape, Request, Timeout
from burst import controller as burst_controller
from burst.wire import VERSIONS
from fmq.end import DEFAULT_SPIN


@pytest.fixture(params=VERSIONS)
def wire(request):
    """Everything here holds in each wire version."""
    return request.param


@pytest.fixture
def slow(increment, gate):
    """Waits at the gate when it has four bytes to increment, and not when it has more."""

    class Slow(increment):
        def run(self):
            if len(self.source) == 4:
                gate()
            super().run()

    return Slow


class TestOneAtATime:
    """Two callers, timeouts and interruptions: every caller gets the result of its own request or an error."""

    def test_busy(self, host, burst, memory, slow, gate):
        """A second thread gets Busy, the first one its result."""
        client, pool, results = burst(host(slow)), memory(), []
        runner = threading.Thread(target=lambda: results.append(client.run(pool)))
        runner.start()
        assert gate.entered.acquire(timeout=20)
        for _ in range(3):
            with pytest.raises(Busy):
                client.run(pool, 5)
        gate.open.release()
        runner.join()
        assert results[0].output_shapes == (OutputShape((4,)),)
        assert client.run(pool, 5).output_shapes == (OutputShape((5,)),)

    @pytest.mark.parametrize("spin", [0.0, DEFAULT_SPIN])
    @pytest.mark.parametrize("timeout", [0, 0.01])
    def test_a_late_result_is_dropped(self, host, burst, memory, slow, gate, timeout, spin):
        """A caller who stopped waiting leaves the burst usable, and the next one gets its own result."""
        client, pool = burst(host(slow), spin=spin), memory()
        for _ in range(3):
            with pytest.raises(Timeout, match="is dropped"):
                client.run(pool, timeout=timeout)
            assert gate.entered.acquire(timeout=20)
            gate.open.release()
            assert client.run(pool, 5).output_shapes == (OutputShape((5,)),)
        assert (client.trace.page.client.timeouts, client._caller.results) == (3, 6)

    def test_a_result_that_stays_away(self, host, burst, memory, slow, gate):
        """While a late result is still to come, requests run into their timeouts and are not sent."""
        client, pool = burst(host(slow)), memory()
        for _ in range(3):
            with pytest.raises(Timeout):
                client.run(pool, timeout=0.01)
        assert gate.entered.acquire(timeout=20)
        assert not gate.entered.acquire(blocking=False)
        gate.open.release()
        assert client.run(pool, 5).output_shapes == (OutputShape((5,)),)

    def test_free_memory_while_a_result_is_late(self, host, burst, memory, slow, gate, mappings):
        """Memory may be freed while an abandoned execution still writes to it."""
        device = host(slow)
        client, pool = burst(device), memory()
        with pytest.raises(Timeout):
            client.run(pool, timeout=0.01)
        assert gate.entered.acquire(timeout=20)
        client.free_memory(pool)
        device.wait_freed()
        gate.open.release()
        assert client.run(memory(), 5).output_shapes == (OutputShape((5,)),)
        assert mappings(pool) == 1


class Interrupted(BaseException):
    """What a signal's handler raises here."""


class TestInterruptions:
    """A handler that raises, as Ctrl-C does, leaves the burst usable, and the next caller gets its own result."""

    @pytest.fixture(autouse=True)
    def handler(self):
        def interrupt(*_):
            raise Interrupted

        old = signal.signal(signal.SIGUSR1, interrupt)
        yield
        signal.signal(signal.SIGUSR1, old)

    @pytest.fixture
    def interrupt(self):
        """Sends the main thread a signal."""
        return lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    @pytest.mark.parametrize("spin", [0.0, DEFAULT_SPIN])
    def test_while_the_device_works(self, host, burst, memory, slow, gate, interrupt, spin):
        """The request was sent and its result is still to come: it is dropped when it comes."""
        client, pool = burst(host(slow), spin=spin), memory()
        for _ in range(3):
            waiter = threading.Thread(target=lambda: gate.entered.acquire(timeout=20) and interrupt())
            waiter.start()
            with pytest.raises(Interrupted):
                client.run(pool)
            waiter.join()
            gate.open.release()
            assert client.run(pool, 5, timeout=20).output_shapes == (OutputShape((5,)),)

    def test_when_the_result_has_come(self, host, burst, memory, increment):
        """The result was taken when the handler ran: nothing is to come, and nobody waits for it."""

        class Interrupting(increment):
            def run(self):
                super().run()
                if len(self.source) == 4:
                    _thread.interrupt_main(signal.SIGUSR1)  # marks it as pending, and does not wake the waiter

        client, pool = burst(host(Interrupting)), memory()
        for _ in range(100):
            with pytest.raises(Interrupted):
                client.run(pool)
            assert client.run(pool, 5, timeout=20).output_shapes == (OutputShape((5,)),)

    def test_before_anything_was_sent(self, host, burst, memory, monkeypatch):
        """A handler that runs before the request is out leaves nothing to wait for."""
        client, pool = burst(host()), memory()
        packet = client.encode(Request((), (), (pool,)))
        with monkeypatch.context() as patch:
            patch.setattr(burst_controller, "start", lambda *_: signal.raise_signal(signal.SIGUSR1))
            for _ in range(2):
                with pytest.raises(Interrupted):
                    client.send(packet)
        assert client.in_flight == 0
        assert client.run(pool, 5, timeout=20).output_shapes == (OutputShape((5,)),)

    def test_while_a_late_result_is_waited_for(self, host, burst, memory, slow, gate, interrupt):
        """A result that was late before the interruption is still dropped after it."""
        client, pool = burst(host(slow)), memory()
        with pytest.raises(Timeout):
            client.run(pool, timeout=0)
        assert gate.entered.acquire(timeout=20)
        for _ in range(2):
            timer = threading.Timer(0.01, interrupt)
            timer.start()
            with pytest.raises(Interrupted):
                client.run(pool, 6)
            timer.join()
        gate.open.release()
        assert client.run(pool, 5, timeout=20).output_shapes == (OutputShape((5,)),)
        assert client.in_flight == 0


@pytest.mark.parametrize("nice", [0, 19])
def test_a_thread_that_gives_way(nice):
    """Has a nice value of 10 or more, also where the program's own is 19 already, which it may not lower."""
    code = (
        "import os, sys; from burst.run_queue import give_way; os.nice(int(sys.argv[1])); give_way(); "
        "print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = subprocess.run([sys.executable, "-c", code, str(nice)], capture_output=True, text=True, check=True).stdout
    assert int(found) == max(10, min(19, own + nice))
