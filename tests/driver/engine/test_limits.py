"""What a client, an account and all together may have on a device: refused by name, and given back by who is gone."""

import asyncio
import contextlib
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from waiting import PATIENCE
from worded_files import FILER, file_model

import driver
from burst import (
    Controller,
    ErrorStatus,
    Memory,
    PeerDied,
    Request,
    RequestArgument,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
)
from burst.channel import Channel, close_all
from driver.doctor import running
from driver.engine.limits import OWN_THREADS, Limits, ProcessLimits, limits

X = np.zeros((1, 4), np.float32)


def socket_of(device):
    """A socket of the client's lane."""
    socket, life = device.call("lane")[1]
    os.close(life)
    return Channel.from_fd(socket)


HERE = Path(__file__).parents[1]
HOLDER = """
import sys, driver
sys.path.insert(0, sys.argv[1])
from small_models import add_model
device = None
while not device:
    try:
        device = driver.connect()
    except driver.ResourceExhaustedTransient:
        pass  # the one before is being buried
prepared = device.prepare(add_model())
bursts = [prepared.burst() for _ in range(4)]
print("engine", device.engine_pid, flush=True)
sys.stdin.read()
"""


def filled_model(inside):
    """The sum of as many ones as an input says; `inside`: which a branch makes."""
    m, branch = driver.ModelBuilder(), driver.ModelBuilder()
    size, condition = m.input("int32", (1,)), m.input("bool8", (1,))
    if inside:
        branch.output(branch.operation("FILL", branch.input("int32", (1,)), 1.0))
        ones = m.operation("IF", condition, branch.build(), branch.build(), size)
    else:
        ones = m.operation("FILL", size, 1.0)
    m.output(m.operation("REDUCE_SUM", ones, np.array([0], np.int32), False))
    return m.build()


def most_resident(pid):
    """The most memory that it has had."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fill(kept, make):
    """Make things, and keep them, until one is refused."""
    while len(kept) < 1000:
        kept.append(make())


class TestClient:
    """Limits of one client."""

    def test_bursts(self, configure, kit):
        """One burst too many is refused with the limit, its value, its file and what to do; a closed one makes room."""
        path = configure(client_bursts=3)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            bursts = [prepared.burst() for _ in range(3)]
            with pytest.raises(ResourceExhaustedTransient, match=f"client_bursts = 3 .*close bursts.*{path}"):
                prepared.burst()
            bursts.pop().close()

            def opened():
                with contextlib.suppress(ResourceExhaustedTransient):
                    return prepared.burst()

            with kit.until(opened) as burst:
                assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]
            with driver.connect() as other, other.prepare(kit.add_model()) as theirs, theirs.burst() as burst:
                assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]

    def test_models(self, configure, kit):
        """One prepared model too many is refused; a closed one makes room at once."""
        path = configure(client_models=2)
        with driver.connect() as device:
            models = [device.prepare(kit.add_model(float(n))) for n in range(2)]
            with pytest.raises(ResourceExhaustedTransient, match=f"client_models = 2 .*{path}"):
                device.prepare(kit.add_model(2.0))
            models[0].close()
            with device.prepare(kit.add_model(2.0)) as prepared:
                assert prepared.run(X)[0].tolist() == [[2, 2, 2, 2]]

    def test_connections(self, configure, kit):
        """One socket too many is refused, and those that are there go on."""
        path = configure(client_connections=1)
        with (
            driver.connect() as device,
            device.prepare(kit.add_model()) as prepared,
            contextlib.closing(socket_of(device)),
        ):
            with pytest.raises(ResourceExhaustedTransient, match=f"client_connections = 1 .*{path}"):
                prepared.run(X)
            with prepared.burst() as burst:
                assert burst.run(X).outputs[0].tolist() == [[1, 1, 1, 1]]

    @pytest.mark.parametrize("way", ["burst", "run", "run_async"])
    @pytest.mark.parametrize("inside", [False, True])
    def test_sizes_by_values(self, configure, kit, way, inside):
        """What an input's value asks for is counted before it is taken: temporaries, and results of a branch. The next
        request, of another value, succeeds.
        """
        configure(client_bytes=2**24)
        with driver.connect() as device, device.prepare(filled_model(inside)) as prepared, prepared.burst() as burst:
            run = {
                "burst": burst.run,
                "run": prepared.run,
                "run_async": lambda *x: asyncio.run(prepared.run_async(*x)),
            }[way]
            before = most_resident(device.engine_pid)
            with pytest.raises(ResourceExhaustedPersistent, match=r"an execution or a buffer needs 1073741824 bytes"):
                run(np.array([2**28], np.int32), np.ones(1, bool))
            assert most_resident(device.engine_pid) < before + 2**26
            run(np.array([2**10], np.int32), np.ones(1, bool))

    def test_queues(self, kit):
        """A burst whose queues are longer than they may be never fits; a shorter one does."""
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            with pytest.raises(ResourceExhaustedPersistent, match=r"131072 exceeds .*burst_elements = 65536"):
                Controller(prepared.configure_burst(0.0), length=2**17)
            Controller(prepared.configure_burst(0.0), length=256).close()


class TestDevice:
    """Limits of an account, and of all clients of a device."""

    @pytest.mark.parametrize("name", ["uid_clients", "device_clients"])
    def test_clients(self, configure, kit, name):
        """One client too many is told why, and is let in when another has left."""
        path = configure(**{name: 2})
        with driver.connect(), driver.connect() as last:
            with pytest.raises(ResourceExhaustedTransient, match=f"{name} = 2 .*close connections.*{path}"):
                driver.connect()
            last.close()

            def connected():
                with contextlib.suppress(ResourceExhaustedTransient):
                    return driver.connect()

            kit.until(connected).close()

    def test_refused_in_numbers(self, configure, kit):
        """Many who come at once to a device that is full are all refused, and it serves its client meanwhile."""
        configure(device_clients=1)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            for _ in range(100):
                with pytest.raises((ResourceExhaustedTransient, PeerDied, driver.DriverError)):
                    driver.connect()
            assert prepared.run(X)[0].tolist() == [[1, 1, 1, 1]]

    @pytest.mark.integration
    def test_killed(self, configure, kit):
        """Who is killed at the limit gives back everything, again and again, to others on the same device."""
        configure(uid_clients=2, client_bursts=4, client_models=1)
        device, engines = driver.connect(), set()  # one client is us, so that the device stays
        for _ in range(4):
            with kit.python(
                HOLDER, HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as child:
                line = child.stdout.readline()
                child.kill()
                _, words = child.communicate()
            assert line.startswith("engine "), words
            engines.add(line)
        device.close()
        assert len(engines) == 1


class TestAccount:
    """What one account may hold of the tables of the device's processes."""

    def test_applications(self, configure, kit):
        """One application cannot take all threads: its sockets are refused with the figure, and another one of
        the account finds some. What is closed is free again.
        """
        path = configure(account_threads=12)  # the connection of each application has one
        with driver.connect(application="a") as device, driver.connect(application="b") as other:
            fds = [device.call("lane")[1] for _ in range(8)]
            words = (
                "75 % of account_threads = 12 is reached: this application has 9 threads .* asks for 1 more; "
                f"make fewer calls at once, or raise account_threads in {path}"
            )
            with pytest.raises(ResourceExhaustedTransient, match=words):
                device.call("lane")
            fds += [other.call("lane")[1] for _ in range(2)]
            with pytest.raises(ResourceExhaustedTransient, match=r"account_threads = 12 .* this account has 12"):
                other.call("lane")
            close_all(fds.pop())
            close_all(fds.pop())

            def opened():
                with contextlib.suppress(ResourceExhaustedTransient):
                    return other.call("lane")[1]

            kit.until(opened)

    def test_threads_and_clients(self, configure, kit):
        """What a burst or a client costs besides is counted, too; a client that is refused is told why."""
        configure(account_threads=8)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            bursts = [prepared.burst() for _ in range(5)]
            with pytest.raises(ResourceExhaustedTransient, match=r"account_threads = 8 .*has 6 threads .*close bursts"):
                prepared.burst()
            with (
                driver.connect(application="b"),
                pytest.raises(ResourceExhaustedTransient, match=r"account_threads = 8 .*close connections"),
            ):
                driver.connect(application="b")
            assert bursts[0].run(X).outputs[0].tolist() == [[1, 1, 1, 1]]

    @pytest.mark.integration
    def test_threads_that_a_runtime_starts(self, configure):
        """What it starts for each model is in no ledger: a model too many is refused, and those that are there run."""
        configure(account_threads=16)
        with driver.connect(FILER) as device, contextlib.ExitStack() as stack:
            prepared, files = [], [file_model(f"load:threads {n}") for n in range(2 + (16 + OWN_THREADS) // 16)]
            with pytest.raises(ResourceExhaustedTransient, match=r"runtime has started .* raise account_threads in"):
                prepared.extend(stack.enter_context(device.prepare(each)) for each in files)
            assert len(prepared) > 2
            assert prepared[-1].run(X[0])[0].tolist() == [1, 1, 1, 1]

    def test_buffers(self, configure, kit):
        """Objects of a few bytes are limited by what the engine keeps for each."""
        configure(account_bytes=200_000)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:

            def buffer():
                return device.allocate(driver.BufferDesc(), [prepared], [driver.BufferRole(0, 0)])

            buffers = []
            with pytest.raises(ResourceExhaustedTransient, match=r"account_bytes = 200000 .*release buffers"):
                fill(buffers, buffer)
            buffers.pop().close()
            buffers.append(buffer())

    def test_plans(self, configure, kit):
        """Requests that stay bound make room for others: no request is refused for their number."""
        configure(account_bytes=500_000)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared, prepared.burst(depth=8) as burst:
            for pool in [Memory.create(64) for _ in range(100)]:
                request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
                assert prepared.execute(request).status == 0
                assert pool.asarray(np.float32, 4, 16).tolist() == [1, 1, 1, 1]
            assert [burst.run(X).outputs[0].tolist() for _ in range(20)] == [[[1, 1, 1, 1]]] * 20

    @pytest.mark.parametrize("way", ["execute", "execute_async", "execute_fenced"])
    def test_memory_of_requests(self, configure, kit, way):
        """A request whose memory is refused succeeds once there is room: its memory is sent again."""
        configure(account_bytes=2**20, client_bytes=2**20)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:

            def status(request):
                try:
                    result = getattr(prepared, way)(request)
                except ResourceExhaustedTransient as error:
                    return error.status
                return (result if way == "execute" else result.result(PATIENCE)).status

            requests = [kit.request([X], 16)[0] for _ in range(1000)]
            refused = [request for request in requests if status(request)]
            assert len(requests) > len(refused) > 100
            for memory in {pool for request in requests if request not in refused for pool in request.pools}:
                device.free_memory(memory)
            assert [status(request) for request in refused[:100]] == [ErrorStatus.NONE] * 100

    def test_fences(self, configure, kit):
        """Fences are counted, as descriptors, while an execution waits for them."""
        configure(account_descriptors=24)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            pool, gate = Memory.create(64), os.eventfd(0)
            request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
            waiting = []
            with pytest.raises(ResourceExhaustedTransient, match=r"account_descriptors = 24 .* 1[78] open descriptors"):
                fill(waiting, lambda: prepared.execute_fenced(request, [gate]))
            os.eventfd_write(gate, 1)
            assert {execution.result(PATIENCE).status for execution in waiting} == {0}
            prepared.execute_fenced(request, [gate]).result(PATIENCE)
            os.close(gate)

    def test_doctor(self, configure, kit):
        """`burst doctor` names the account that is nearest to a limit."""
        configure(account_threads=8)
        with driver.connect(application="camera") as device, device.prepare(kit.add_model()) as prepared:
            bursts = [prepared.burst() for _ in range(5)]
            (found,) = [found for found in running.devices() if found.subject == "reference, what accounts hold"]
            assert (found.state, len(bursts)) == ("note", 5)
            assert found.found == f"at most 100% of a limit: uid {os.getuid()}, camera has 6 of 6 threads"
            assert "raise account_threads in " in found.remedy

    def test_descriptors_of_a_call(self, configure):
        """Descriptors that come with a call count until it is answered, in the service and in the engine."""
        configure(account_descriptors=16)
        with driver.connect() as device, contextlib.ExitStack() as stack:
            fds = [stack.enter_context(open(os.devnull)).fileno() for _ in range(30)]
            for method in ("free", "supported"):
                with pytest.raises(ResourceExhaustedPersistent, match=r"account_descriptors = 16 .* asks for 30"):
                    device.call(method, 0, fds=fds)
            device.call("free", 0, fds=fds[:2])

    def test_descriptors_of_a_launch(self, configure, kit):
        """Fences that come with a launch count as long as it waits for them; any number of launches may bring some, one
        after the other.
        """
        configure(account_descriptors=24)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            pool, gate = Memory.create(64), os.eventfd(1)
            request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
            with pytest.raises(ResourceExhaustedPersistent, match=r"account_descriptors = 24 .* asks for 31"):
                prepared.execute_fenced(request, [gate] * 30)
            for _ in range(30):
                prepared.execute_fenced(request, [gate] * 2).result(PATIENCE)
            os.close(gate)

    def test_no_thread_for_an_execution(self, configure, kit):
        """A launched execution for which the account may start no thread is told so; it does not wait for ever."""
        configure(account_threads=4)
        with driver.connect() as device, device.prepare(kit.add_model()) as prepared:
            pool = Memory.create(64)
            request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
            assert prepared.execute_async(request).result(PATIENCE).status == ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


class TestFile:
    """limits.toml."""

    @pytest.mark.parametrize("name", Limits.settings())
    @pytest.mark.parametrize("value", ["0", "-1", '"many"', "true", "nan"])
    def test_wrong(self, configure, name, value):
        """What makes no sense is refused with the file, the name and the value."""
        path = configure(**{name: value})
        with pytest.raises(ValueError, match=f"{path}: {name} = "):
            limits()

    def test_documented(self):
        """Every limit is in the table of its page."""
        page = (Path(driver.__file__).parents[1] / "docs/limits.md").read_text()
        assert [name for name in Limits.settings() if f"`{name}`" not in page] == []

    def test_unknown(self, configure):
        """A name that is none is refused, with those that are."""
        configure(client_burst=3)
        with pytest.raises(ValueError, match=r"client_burst = 3: the limits are client_bytes, .*client_bursts"):
            limits()

    def test_fractions(self, configure):
        """Seconds may be fractions; numbers of things may not."""
        configure(idle_seconds=0.5)
        assert limits().idle_seconds == 0.5
        configure(client_bursts=2.5)
        with pytest.raises(ValueError, match=r"client_bursts = 2\.5"):
            limits()

    def test_device_with_a_wrong_file(self, configure):
        """A device does not start on limits that do not exist; the end of its log says which."""
        configure(client_burst=3)
        with pytest.raises(driver.DriverError, match="client_burst = 3"):
            driver.connect()


def test_no_setting_lifts_what_the_process_has():
    """An account that may have more descriptors and threads than the process has gets no more than all have."""
    process = ProcessLimits(descriptors=1000, threads=100)
    figures = Limits(1, 1, account_descriptors=10**6, account_threads=10**5, process=process).figures()
    for figure, most in (("descriptors", 1000), ("threads", 100)):
        assert (figures[figure].account, figures[figure].device) == (most, most)


def test_two_accounts_leave_tasks_to_others(monkeypatch, tmp_path):
    """The processes of all accounts count in one number of tasks, as systemd's 4,915: what two of them may have in
    their services and engines is three quarters of it.
    """
    (tmp_path / "pids.max").write_text("4915")
    monkeypatch.setattr("driver.engine.limits.control_groups", lambda _: [tmp_path])
    most = limits().figures()["threads"].account
    assert most > 512
    assert 2 * 2 * most <= 4915 * 3 // 4
