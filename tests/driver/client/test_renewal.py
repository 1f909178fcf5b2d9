"""A device renews itself: a second engine takes over, and no request is lost, doubled, wrong or failed."""

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from waiting import until

import driver
from burst import GeneralFailure, ResourceExhaustedTransient, StatusError
from driver.cli.command import burst as command
from driver.client import discovery, moving, pausing
from driver.client.connection import Connection
from driver.client.device_buffers import BufferDesc, BufferRole
from driver.doctor import running
from driver.engine.scheduling_attributes import attributes_of
from driver.service.engine_renewal import Renewal

ONCE = "burst_test_devices.single:Accelerator"


def frame(n):
    return np.array([[n, 1, 2, 3]], np.float32)


def is_right(result, n):
    return np.array_equal(result.outputs[0], frame(n) + 1)


@pytest.fixture
def device(place, kit):
    """A reference device that nobody else uses."""
    with kit.living("reference") as device:
        yield device


@pytest.fixture
def prepared(device, kit):
    """x + 1."""
    with device.prepare(kit.add_model()) as prepared:
        yield prepared


def ask(device, stage="asked"):
    """Ask for a renewal; return the first connection."""
    first = device.connection
    assert first.call("renew", "a test")[0][1] == stage
    return first


def stays(first):
    """Wait until the first engine goes on; return why."""
    state = moving.await_change(first, 0.0)
    while state.is_going_on:
        state = moving.await_change(first, 1.0)
    return state.words


def threads_of(pid):
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def policies(pid):
    """The scheduling policies of the threads of a process."""
    return {os.sched_getscheduler(thread) for thread in threads_of(pid)}


def has_gone_over(burst, first):
    return not burst.source.session.is_at(first)


class TestRequests:
    """Requests go on meanwhile."""

    def test_a_burst_goes_over_between_two_requests(self, device, prepared, process):
        """Every result is right, the next engine is another one, and the first service ends."""
        with prepared.burst() as burst:
            assert is_right(burst.run(frame(0)), 0)
            its = process(device.service_pid), process(device.engine_pid)
            first = ask(device)
            numbers = itertools.count(1)
            while not has_gone_over(burst, first):
                n = next(numbers)
                assert is_right(burst.run(frame(n)), n)
            assert all(is_right(burst.run(frame(n)), n) for n in range(100))
            assert device.engine_pid != its[1].pid
            assert all(each.has_ended() for each in its)
            assert is_right(burst.run(frame(7)), 7)
            assert burst.stats()["recoveries"] == 0
            with driver.connect("reference") as other:
                assert other.engine_pid == device.engine_pid

    def test_several_in_flight(self, device, prepared):
        """Each of them comes once, in order, from whichever engine had it."""
        with prepared.burst(depth=4) as burst:
            first, pending = ask(device), []
            for n in itertools.count():
                pending.append((n, burst.submit(frame(n))))
                if len(pending) == 4:
                    number, future = pending.pop(0)
                    assert is_right(future.result(), number)
                if has_gone_over(burst, first) and len(pending) == 3:
                    break
            assert all(is_right(future.result(), n) for n, future in pending)

    def test_every_other_way(self, device, prepared, process, kit):
        """Executions that wait, that do not, and that are fenced find the next engine by themselves, in threads."""
        its, failures = process(device.service_pid), []

        def work(run):
            try:
                for n in itertools.count():
                    assert np.array_equal(run(frame(n)), frame(n) + 1)
                    if its.has_ended(0):
                        return
            except BaseException as error:  # noqa: BLE001 (told below)
                failures.append(error)

        def fenced(x):
            request, _ = kit.request([x], x.nbytes)
            return prepared.execute_fenced(request).result().outputs[0]

        ways = [lambda x: prepared.run(x)[0], lambda x: asyncio.run(prepared.run_async(x))[0], fenced] * 2
        threads = [threading.Thread(target=work, args=(way,)) for way in ways]
        ask(device)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_several_clients(self, device, prepared, process, kit):
        """Each goes over by itself, and one starts the engine for all."""
        with contextlib.ExitStack() as stack:
            others = [stack.enter_context(driver.connect("reference")) for _ in range(3)]
            models = [stack.enter_context(other.prepare(kit.add_model())) for other in others]
            its = process(device.service_pid)
            ask(device)
            assert its.has_ended()
            assert all(map(is_right_now, (prepared, *models)))
            assert len({each.engine_pid for each in (device, *others)}) == 1

    def test_again(self, device, prepared):
        """A device renews itself as often as it is asked."""
        with prepared.burst() as burst:
            for n in range(3):
                first = ask(device)
                while not has_gone_over(burst, first):
                    assert is_right(burst.run(frame(n)), n)

    def test_buffers_of_the_device_come_first(self, device, prepared):
        """While a client has buffers on the device, it waits with them; once they are released, it goes over."""
        buffer = device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0)], [])
        buffer.copy_from(frame(3))
        first = ask(device)
        assert moving.await_change(first, 0.2).stage == "asked"
        assert buffer.has_value
        assert device.connection is first
        buffer.close()
        while device.connection is first:
            assert is_right_now(prepared)

    def test_by_a_signal(self, device, prepared, process):
        """SIGHUP of the service asks for it, too."""
        its = process(device.service_pid)
        os.kill(device.service_pid, signal.SIGHUP)
        assert its.has_ended()
        assert is_right_now(prepared)


def is_right_now(prepared):
    return np.array_equal(prepared.run(frame(5))[0], frame(5) + 1)


class TestTheFirstGoesOn:
    """What is wrong with the second engine costs no request."""

    @pytest.fixture
    def fragile(self, place, kit):
        with kit.living(kit.odd("Fragile")) as device, device.prepare(kit.add_model(relaxed=True)) as prepared:
            yield device, prepared

    def test_when_the_second_crashes(self, place, fragile):
        """It crashes as it prepares the model. The next renewal is made."""
        device, prepared = fragile
        (place.path / "crash-1").touch()
        first = ask(device)
        assert str(os.getpid()) in stays(first)
        assert device.connection is first
        assert is_right_now(prepared)
        ask(device)
        while device.connection is first:
            assert is_right_now(prepared)

    def test_when_the_second_hangs(self, place, fragile, monkeypatch):
        """It is given up after a while."""
        monkeypatch.setattr(moving, "WITHIN", 1.0)
        device, prepared = fragile
        (place.path / "hold").touch()
        first = ask(device)
        assert "not ready within 1 s" in stays(first)
        assert device.connection is first
        assert is_right_now(prepared)

    def test_when_the_second_computes_other_bits(self, place, kit):
        """Both execute a copy of a request that was made before, and are compared."""
        with (
            kit.living(kit.odd("Changing")) as device,
            device.prepare(kit.add_model()) as prepared,
            prepared.burst() as burst,
        ):
            assert is_right(burst.run(frame(1)), 1)
            (place.path / "changed").touch()
            first = ask(device)
            assert "other bits" in stays(first)
            (found,) = [each for each in running.devices() if each.subject.endswith("renewal")]
            assert (found.state, "other bits" in found.found) == ("warning", True)
            assert is_right(burst.run(frame(2)), 2)
            assert device.connection is first

    def test_where_it_exists_once(self):
        """An accelerator that is served is not renewed, and says so."""
        with pytest.raises(GeneralFailure, match="exists once"):
            Renewal(None, "it exists once", lambda: 0, list).begin("a test")

    def test_where_no_client_can_go_over(self):
        """New clients go to a second engine all the same, where the service itself can begin one."""
        found = Renewal(SimpleNamespace(begin_beside=lambda: True), "", lambda: 0, list)
        found.note_models("a program in C")
        found.begin("a test")
        assert (found.state.stage, found.is_succeeded, found.fixed) == ("moving", True, 1)

    def test_a_restart_with_a_client_that_cannot_wait(self):
        """It is refused at once, and nobody waits; one that comes meanwhile ends it."""
        for comes in ("before", "after"):
            found = Renewal(SimpleNamespace(stay=list), "it exists once", lambda: 0, list, restarts=True)
            if comes == "before":
                found.note_models("a program in C")
                with pytest.raises(GeneralFailure, match="programs in C"):
                    found.begin("a test")
            else:
                found.begin("a test")
                assert found.state.stage == "draining"
                found.note_models("a program in C")
            assert found.state.stage == "stayed"
            found.forget("a program in C")
            found.begin("a test")
            assert found.state.stage == "draining"

    def test_without_memory_for_two(self):
        """The figures are told."""
        found = Renewal(None, "", lambda: 2**60, list)
        with pytest.raises(ResourceExhaustedTransient, match=str(2**60)):
            found.begin("a test")
        assert found.state.stage == "stayed"


class TestPriority:
    """The second engine takes no processor from requests that go on in the first."""

    def test_it_is_low_until_all_is_ready(self, place, kit):
        """All threads of the engine are SCHED_BATCH while it prepares; then they are as those of any process."""
        with kit.living(kit.odd("Fragile")) as device, device.prepare(kit.add_model(relaxed=True)) as prepared:
            known = {device.service_pid, device.engine_pid}
            (place.path / "hold").touch()
            first = ask(device)
            until((place.path / "held").exists)
            (second,) = [pid for pid in place.pids() if pid not in known and os.SCHED_BATCH in policies(pid)]
            assert policies(second) == {os.SCHED_BATCH}
            assert policies(device.engine_pid) == {os.SCHED_OTHER}
            (place.path / "hold").unlink()
            while device.connection is first:
                assert is_right_now(prepared)
            assert device.engine_pid == second
            assert policies(second) == {os.SCHED_OTHER}
            assert {attributes_of(thread).runtime for thread in threads_of(second)} == {attributes_of().runtime}

    def test_others_do_not_wait(self, place, kit):
        """A client that does not come from another engine ends the low priority as soon as it prepares something."""
        with kit.living(kit.odd("Fragile")) as device, device.prepare(kit.add_model(relaxed=True)) as prepared:
            (place.path / "hold").touch()
            first = ask(device)
            until((place.path / "held").exists)
            its = discovery.Place(discovery.runtime_dir(), device.address, apart="next")
            with contextlib.closing(Connection(discovery.find(its))) as other:
                assert policies(other.engine_pid) == {os.SCHED_BATCH}
                with pytest.raises(StatusError):
                    other.call("prepare", [0, 0])
                assert policies(other.engine_pid) == {os.SCHED_OTHER}
            (place.path / "hold").unlink()
            while device.connection is first:
                assert is_right_now(prepared)


class TestCommand:
    """`burst renew`."""

    def test_it_waits_until_all_have_gone_over(self, device, prepared):
        """It says that the first engine has ended."""
        pid = device.engine_pid
        found = CliRunner().invoke(command, ["renew", "reference"])
        assert found.output == f"renewed: engine {pid} has ended, and all its clients have another one\n"
        assert device.engine_pid != pid
        assert is_right_now(prepared)

    def test_one_that_does_not_run(self, place):
        """It is no device to renew."""
        found = CliRunner().invoke(command, ["renew", "reference"])
        assert found.exit_code == 1
        assert "does not run" in found.output

    def test_one_that_exists_once(self, place, kit):
        """It is restarted, between requests."""
        with kit.living(ONCE) as device, device.prepare(kit.add_model()) as prepared:
            pid = device.engine_pid
            found = CliRunner().invoke(command, ["renew", ONCE])
            assert found.output == f"renewed: engine {pid} has ended, and all its clients have another one\n"
            assert is_right_now(prepared)
            assert device.engine_pid != pid


class TestRestart:
    """A device that exists once is restarted when nothing is in flight; requests wait, and none fails."""

    @pytest.mark.parametrize("depth", [1, 4])
    def test_requests_wait(self, place, kit, process, depth):
        """Those of bursts that do not even recover, and others, from several clients."""
        with contextlib.ExitStack() as stack:
            device, other = (stack.enter_context(kit.living(ONCE)) for _ in range(2))
            prepared, others = (stack.enter_context(each.prepare(kit.add_model())) for each in (device, other))
            burst = stack.enter_context(prepared.burst(depth=depth))
            its, first = process(device.engine_pid), ask(device, "draining")
            for n in itertools.count():
                assert is_right(burst.submit(frame(n)).result(), n)
                assert is_right(burst.run(frame(n)), n)
                assert is_right_now(prepared)
                if device.connection is not first and other.engine_pid == device.engine_pid:
                    break
            assert is_right_now(others)
            assert its.has_ended()

    def test_one_that_leaves_meanwhile(self, place, kit):
        """It holds nobody up."""
        with kit.living(ONCE) as device, device.prepare(kit.add_model()) as prepared:
            other = kit.living(ONCE)
            first = ask(device, "draining")
            assert moving.await_change(first, 0.1).stage == "draining"
            other.close()
            while device.connection is first:
                assert is_right_now(prepared)

    def test_one_that_does_not_wait(self, place, kit, monkeypatch):
        """If one client does not say that it has nothing in flight, all go on as before."""
        monkeypatch.setattr(pausing, "WITHIN", 0.5)
        with kit.living(ONCE) as device, device.prepare(kit.add_model()) as prepared, kit.living(ONCE):
            first = ask(device, "draining")
            assert "in flight" in stays(first)
            assert is_right_now(prepared)
            assert device.connection is first


@pytest.mark.parametrize(
    "answer", [[1, "asked"], [1, "going", ""], ["1", "asked", ""], [1, "asked", 2], [], [1, "asked", "no descriptor"]]
)
def test_a_device_that_lies(answer):
    """What it says of renewals makes sense, or is not listened to: models are prepared all the same."""
    connection = SimpleNamespace(is_watched=False, call=lambda *_, **__: (answer, []))
    before = threading.active_count()
    moving.watch(None, connection)
    assert connection.is_watched
    assert threading.active_count() == before


def test_who_starts_a_second_engine():
    """A client does so for devices by name, and never for one that is served."""
    assert discovery.starts("reference")
    assert not discovery.starts("/run/burst/reference.sock")


STEPS = ["reach", "make_ready", "move_bursts", "retire"]


@pytest.mark.parametrize("victim", ["first", "second"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_each_step(device, prepared, monkeypatch, step, when, victim):
    """A burst that recovers has every result, each right, whichever engine is killed, and whenever."""
    done, original = threading.Event(), getattr(moving.Move, step)

    def kill(move):
        connection = move.old if victim == "first" else move.new
        with contextlib.suppress(ProcessLookupError):
            if connection:
                os.kill(connection.engine_pid, signal.SIGKILL)

    def stepped(move, *arguments):
        if when == "before":
            kill(move)
        try:
            return original(move, *arguments)
        finally:
            if when == "after":
                move.new = move.new or move.device.connection
                kill(move)
            done.set()

    monkeypatch.setattr(moving.Move, step, stepped)
    with prepared.burst(recover=True) as burst:
        ask(device)
        for n in itertools.count():
            assert is_right(burst.run(frame(n)), n)
            if done.is_set():
                break
        assert all(is_right(burst.run(frame(n)), n) for n in range(50))
