"""Executions of a device have their turn: by priority, by client, by account.

With real devices, and with one whose steps the test takes.
"""

import contextlib
import mmap
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest
from sent_models import call_with_model
from waiting import nested

import driver
from burst import ErrorStatus, InvalidArgument
from driver.engine.limits import limits, weights
from driver.options import PRIORITIES

X = np.ones((1, 4), np.float32)
LOW, MEDIUM, HIGH = PRIORITIES
ANY = 255  # number of steps


class Steps:
    """The steps of odd.Stepwise."""

    def __init__(self, path):
        with path.open("a+b") as file:  # never shorter: a device may have it mapped
            file.truncate(256)
            self._bytes = mmap.mmap(file.fileno(), 256)
        self.reset()

    def reset(self):
        self._bytes[:] = bytes(256)

    def allow(self, n):
        self._bytes[0] = n

    @property
    def taken(self):
        """Whose, in their order."""
        return list(self._bytes[2 : 2 + self._bytes[1]])


@pytest.fixture
def steps(home):
    return Steps(home.path / "steps")


def stepwise(kit):
    return kit.living(kit.odd("Stepwise"))


def frame(count, name):
    """The input of an execution of so many steps."""
    return np.array([[count, name, 0, 0]], np.float32)


@contextlib.contextmanager
def burst_of(kit, priority, depth=1, connect=stepwise):
    """Of a connection of its own: a client."""
    with (
        connect(kit) as device,
        device.prepare(kit.add_model(), priority=priority) as prepared,
        prepared.burst(depth=depth) as burst,
    ):
        yield device, burst


def waiting(device, priority):
    return device.stats()["priorities"][priority]["waiting"]


# ---- what a client says


@pytest.mark.parametrize("priority", [-1, 3, True, 1.0, "high", b"", [1]])
def test_invalid_priorities_are_refused(priority, device, kit):
    """By the device, whatever a client sends, for models that are sent and for those that were kept."""
    connection = device.connection
    terms = None, None, "fast_single_answer", None, priority
    with pytest.raises(InvalidArgument, match="priority"):
        call_with_model(connection, "prepare", kit.add_model(), *terms)
    with pytest.raises(InvalidArgument, match="priority"):
        connection.call("restore", [0, 0], bytes(32), "fast_single_answer", None, priority)


def test_names_that_are_no_priorities(device, kit):
    """Are refused before anything is sent."""
    for prepare in (device.prepare, driver.compile):
        with pytest.raises(ValueError, match="priority='highest': one of 'low', 'medium', 'high'"):
            prepare(kit.add_model(), priority="highest")


@pytest.mark.parametrize("priority", PRIORITIES)
def test_a_priority_goes_with_a_prepared_model(priority, kit, home):
    """On both paths, in a model that was compiled, and in one that was pickled: the device counts it as such."""
    with kit.living("reference") as device:
        with device.prepare(kit.add_model(), priority=priority) as prepared, prepared.burst() as burst:
            prepared.run(X)
            burst.run(X)
            burst.run(X)
            again = prepared.__reduce__()
        with driver.compile(kit.add_model(), [device], priority=priority) as compiled:
            compiled.run(X)
        counts = device.stats()["priorities"]
        assert {name: found["executions"] for name, found in counts.items()} == {
            name: 4 if name == priority else 0 for name in PRIORITIES
        }
    make, arguments = again
    prepared = make(*arguments)
    with prepared.device as device:
        prepared.run(X)
        assert device.stats()["priorities"][priority]["executions"] == 1


def test_clients_with_one_model_have_their_own_priorities(kit, home):
    """What a device made of a model is shared; how urgent it is, is not."""
    with burst_of(kit, LOW, connect=reference) as (low, one), burst_of(kit, HIGH, connect=reference) as (high, other):
        one.run(X)
        other.run(X)
        assert [device.stats()["priorities"][HIGH]["executions"] for device in (low, high)] == [0, 1]


def reference(kit):
    return kit.living("reference")


# ---- whose turn it is


def test_an_urgent_execution_waits_for_one_step(kit, steps):
    """Beside four clients of low priority: when it waits, the one that runs takes the step that it is at, and then
    those of the urgent one come, all of them; the low ones go on where they were, and all come to their end.
    """
    with contextlib.ExitStack() as stack:
        low = [stack.enter_context(burst_of(kit, LOW)) for _ in range(4)]
        device, urgent = stack.enter_context(burst_of(kit, HIGH))
        futures = [burst.submit(frame(6, n)) for n, (_, burst) in enumerate(low)]
        steps.allow(3)
        kit.until(lambda: len(steps.taken) == 3 and sum(waiting(d, LOW) for d, _ in low) == 3)
        future = urgent.submit(frame(5, 9))
        kit.until(lambda: waiting(device, HIGH) == 1)
        assert len(steps.taken) == 3
        steps.allow(ANY)
        assert future.result(kit.patience).outputs[0].tolist() == (frame(5, 9) + 1).tolist()
        for n, found in enumerate(futures):
            assert found.result(kit.patience).outputs[0].tolist() == (frame(6, n) + 1).tolist()
        taken = steps.taken
        assert taken.index(9) == 4
        assert taken[4:9] == [9] * 5
        assert sorted(taken) == sorted([*(n for n in range(4) for _ in range(6)), *[9] * 5])
        found = device.stats()["priorities"][HIGH]
        assert (found["executions"], found["waits"], found["yields"], found["waiting"]) == (1, 1, 0, 0)
        assert found["waited"] > 0
        assert sum(d.stats()["priorities"][LOW]["yields"] for d, _ in low) >= 4


def test_equals_take_turns(kit, steps):
    """Of two clients of one priority the one that waits comes at the next step, when a turn is as short as a step; and
    the other one comes to its end, too.
    """
    with burst_of(kit, MEDIUM) as (first, one), burst_of(kit, MEDIUM) as (second, other):
        futures = [one.submit(frame(8, 1)), other.submit(frame(8, 2))]
        kit.until(lambda: waiting(first, MEDIUM) + waiting(second, MEDIUM) == 1)
        steps.allow(ANY)
        for future in futures:
            future.result(kit.patience)
        assert sorted(steps.taken[:2]) == [1, 2]
        assert sorted(steps.taken) == [1] * 8 + [2] * 8


def test_the_plain_path_has_turns_too(kit, steps):
    """Executions of one connection at two priorities, on paths of their own."""
    with stepwise(kit) as device:
        prepared = {priority: device.prepare(kit.add_model(), priority=priority) for priority in (LOW, HIGH)}
        results = {}
        threads = {
            priority: threading.Thread(target=lambda p=priority, n=n: results.update({p: prepared[p].run(frame(4, n))}))
            for n, priority in enumerate(prepared)
        }
        steps.allow(1)
        threads[LOW].start()
        kit.until(lambda: len(steps.taken) == 1)
        threads[HIGH].start()
        kit.until(lambda: waiting(device, HIGH) == 1)
        steps.allow(ANY)
        for thread in threads.values():
            thread.join(kit.patience)
        assert steps.taken in ([0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0])
        assert [results[p][0].tolist() for p in prepared] == [(frame(4, n) + 1).tolist() for n in range(2)]


def launched(kit, way, prepared, x, **terms):
    """A way to wait for the result of an execution that goes on in the background."""
    asked = kit.request([x], x.nbytes)[0]
    execution = (prepared.execute_async if way == "async" else prepared.execute_fenced)(asked, **terms)
    return execution.result


@pytest.mark.parametrize("way", ["async", "fenced"])
def test_an_urgent_execution_does_not_stand_behind_others_of_its_client(kit, steps, way):
    """Behind 24 of low priority it comes after the step that runs, and they come to their end in their order."""
    with stepwise(kit) as device:
        low, high = (device.prepare(kit.add_model(), priority=priority) for priority in (LOW, HIGH))
        others = [launched(kit, way, low, frame(2, n)) for n in range(24)]
        steps.allow(1)
        kit.until(lambda: steps.taken == [0])
        urgent = launched(kit, way, high, frame(2, 99))
        kit.until(lambda: waiting(device, HIGH) == 1)
        steps.allow(ANY)
        assert urgent(kit.patience).status == 0
        assert [other(kit.patience).status for other in others] == [0] * 24
        assert steps.taken.index(99) <= 2
        assert list(dict.fromkeys(steps.taken)) == [0, 99, *range(1, 24)]


@pytest.mark.parametrize("way", ["async", "fenced"])
def test_a_deadline_that_others_use_up_is_missed_in_time(kit, steps, way):
    """While the others still run, and transiently: the same request would have succeeded without them."""
    with stepwise(kit) as device:
        prepared = device.prepare(kit.add_model())
        other = launched(kit, way, prepared, frame(2, 1))
        results = [launched(kit, way, prepared, frame(1, 2), deadline=time.monotonic() + 0.3) for _ in range(3)]
        for result in results:
            found = result(kit.patience)
            assert found.status == ErrorStatus.MISSED_DEADLINE_TRANSIENT
            assert found.cause.phase in {"queued", "waiting for the answer"}
            nested(0, found.cause.late_by)
        steps.allow(ANY)
        assert other(kit.patience).status == 0
        assert steps.taken == [1, 1]


def test_what_is_cancelled_is_not_begun(kit, steps):
    """Futures are done at once, those that waited are not begun, and the next one comes when the first one ends."""
    with stepwise(kit) as device:
        prepared = device.prepare(kit.add_model())
        requests = [kit.request([frame(3, n)], 16)[0] for n in range(3)]
        requests.append(kit.request([frame(1, 3)], 16)[0])
        running, *waiting_, last = [prepared.execute_async(asked) for asked in requests]
        steps.allow(1)
        kit.until(lambda: steps.taken == [0])
        for future in (*waiting_, running):
            assert future.cancel()
            assert future.cancelled()
        assert wait(waiting_, 0).not_done == set()
        refused = requests[0]._replace(outputs=())  # is answered at once, and after the device has read the others
        assert prepared.execute_async(refused).result(kit.patience).status == ErrorStatus.INVALID_ARGUMENT
        steps.allow(ANY)
        assert last.result(kit.patience).status == 0
        assert set(steps.taken) == {0, 3}
        assert not last.cancel()


# ---- clients that go


CLIENT = """
import sys
import numpy as np
import driver
builder = driver.ModelBuilder()
x = builder.input("float32", (1, 4))
builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
device = driver.connect(sys.argv[1])
prepared = device.prepare(builder.build(), priority=sys.argv[2])
burst, frame = prepared.burst(depth=4), np.array([[float(sys.argv[3]), 7, 0, 0]], np.float32)
future = burst.submit(frame)
print("sent", flush=True)
if len(sys.argv) > 4:
    import time
    sys.stdin.readline()
    end = time.monotonic() + float(sys.argv[4])
    while time.monotonic() < end:
        burst.submit(frame)  # waits while four are in flight
    found = device.stats()
    print(found["priorities"][sys.argv[2]]["used"], found["share"])
else:
    future.result()
"""


@contextlib.contextmanager
def another(*words):
    """A client in a process of its own, when it has sent its first request; killed in the end."""
    command = [sys.executable, "-c", CLIENT, *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "sent\n"
            yield process
        finally:
            process.kill()


@pytest.mark.integration
def test_clients_that_are_killed_leave_their_slots(kit, steps):
    """kill -9 of a client that runs, and of those that wait, again and again: what they waited for is not done, and the
    next execution begins.
    """
    name = kit.odd("Stepwise")
    with burst_of(kit, LOW) as (device, burst):
        for _ in range(3):
            with another(name, HIGH, 3), another(name, MEDIUM, 3), another(name, HIGH, 3):
                kit.until(lambda: device.stats()["waiting"] == 2)
            kit.until(lambda: device.stats()["waiting"] == 0)  # the device has heard of their deaths
            steps.allow(ANY)
            assert burst.run(frame(2, 1), timeout=kit.patience).outputs[0].tolist() == (frame(2, 1) + 1).tolist()
            assert len([n for n in steps.taken if n == 7]) <= 3  # of the one that ran
            assert steps.taken[-2:] == [1, 1]
            steps.reset()


# ---- shares


@pytest.mark.integration
def test_equal_processes_share_equally(kit, home):
    """Two processes of one account with executions of 2 ms, for 2 s: what they use is within 10 %."""
    words = kit.odd("Single"), MEDIUM, 0.002, 2
    with another(*words) as one, another(*words) as other:
        for process in (one, other):
            process.stdin.write("go\n")
            process.stdin.flush()
        used = [float(process.communicate(timeout=kit.patience)[0].split()[0]) for process in (one, other)]
    assert min(used) > 0.4
    assert used[0] == pytest.approx(used[1], rel=0.1)


# ---- checkpoints


def chain(layers=12, size=32, channels=16):
    """Convolutions one after the other."""
    m, random = driver.ModelBuilder(), np.random.default_rng(1)
    x = m.input("float32", (1, size, size, channels))
    for _ in range(layers):
        weights = random.standard_normal((channels, 3, 3, channels), np.float32) / np.float32(2 * np.sqrt(channels * 9))
        x = m.operation("CONV_2D", x, weights, np.zeros(channels, np.float32), 1, 1, 1, 1)
    m.output(x)
    return m.build()


def loop(end=100):
    """Counts from its input in steps of 3 to that."""
    condition, body, m = driver.ModelBuilder(), driver.ModelBuilder(), driver.ModelBuilder()
    condition.output(condition.operation("LESS", condition.input("int32", (1,)), np.array([end], np.int32)))
    body.output(body.operation("ADD", body.input("int32", (1,)), np.array([3], np.int32), 0))
    m.output(m.operation("WHILE", condition.build(), body.build(), m.input("int32", (1,))))
    return m.build()


def frames(model):
    """Some inputs for it."""
    random = np.random.default_rng(3)
    operand = model.main.operands[model.main.inputs[0]]
    if operand.type.dtype == np.int32:
        return [np.array([n], np.int32) for n in range(3)]
    return [random.standard_normal(operand.dimensions, np.float32) for _ in range(3)]


def worker(connect, model, priority, expected, rounds):
    """A client that runs the model again and again; what it got that is wrong, and its counts."""
    with connect() as device, device.prepare(model, priority=priority) as prepared, prepared.burst(depth=2) as burst:
        wrong = 0
        for n in range(rounds):
            futures = [(k, burst.submit(frame)) for k, frame in enumerate(frames(model)[: 1 + n % 3])]
            for k, future in futures:
                wrong += not np.array_equal(future.result(60).outputs[0], expected[k])
            wrong += not np.array_equal(prepared.run(frames(model)[0])[0], expected[0])
        return wrong, device.stats()["priorities"][priority]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Reference", chain()),
        ("Reference", loop()),
        ("LiteRt", chain()),
        ("LiteRt", loop(2 * 10**4)),
        ("OnnxRuntime", chain()),
    ],
    ids=["reference", "reference, a loop", "litert", "litert, a loop", "onnxruntime"],
)
def test_results_are_right_with_yields_at_every_checkpoint(name, model, kit, home):
    """Three clients of one priority and one that is more urgent on a device of one slot, whose turns are over at once:
    everybody gets what the device gives to who is alone, bit for bit, and nobody waits for ever.
    """
    connect = lambda: kit.living(f"burst_test_devices.narrow:{name}")  # noqa: E731
    with connect() as device, device.prepare(model) as prepared:
        expected = [prepared.run(frame)[0] for frame in frames(model)]
    yields = 0
    for _ in range(10):  # whether anybody waits at a checkpoint is chance
        with ThreadPoolExecutor(4) as threads:
            work = [threads.submit(worker, connect, model, MEDIUM, expected, 8) for _ in range(3)]
            work.append(threads.submit(worker, connect, model, HIGH, expected, 8))
            found = [future.result(60) for future in work]
        assert [wrong for wrong, _ in found] == [0] * 4
        assert {counts["executions"] for _, counts in found} == {8 + sum(1 + n % 3 for n in range(8))}
        assert found[3][1]["yields"] == 0
        yields += sum(counts["yields"] for _, counts in found[:3])
        if yields > 3 or name == "OnnxRuntime":  # which does not stop for equals
            break
    assert yields > 3 or name == "OnnxRuntime"


def test_an_execution_that_cannot_stop_begins_again(kit, home):
    """ONNX Runtime ends a large model in the midst for somebody more urgent; then it runs from its beginning, and its
    result is right.
    """
    large, connect = chain(60, 64, 32), lambda _: kit.living("burst_test_devices.narrow:OnnxRuntime")
    x = np.random.default_rng(4).standard_normal((1, 64, 64, 32), np.float32)
    with connect(kit) as device, device.prepare(large, priority=LOW) as prepared, prepared.burst() as burst:
        expected = prepared.run(x)[0]
        with burst_of(kit, HIGH, connect=connect) as (_, urgent):
            urgent.run(X)
            broken_off = lambda: device.stats()["priorities"][LOW]["yields"]  # noqa: E731
            for _ in range(20):
                before = begun(device)
                future = burst.submit(x)
                kit.until(lambda: begun(device) > before)  # noqa: B023
                urgent.run(X)
                assert np.array_equal(future.result(kit.patience).outputs[0], expected)
                if broken_off():
                    break
            assert broken_off() == 1


def begun(device):
    """Requests that listeners have taken."""
    return sum(trace.page.device.begun for trace in device.traces())


def test_two_bursts_on_one_model(kit, home):
    """Executions that wait for each other's model wait without a slot: nobody keeps what the other one needs."""
    connect, model = lambda: kit.living("burst_test_devices.narrow:LiteRt"), chain()
    x, results = frames(model)[0], []
    with connect() as device, device.prepare(model, priority=LOW) as prepared:
        expected = prepared.run(x)[0]

        def work():
            with prepared.burst() as burst:
                results.extend(np.array_equal(burst.run(x, timeout=60).outputs[0], expected) for _ in range(40))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        wrong, _ = worker(connect, model, HIGH, [prepared.run(frame)[0] for frame in frames(model)], 10)
        for thread in threads:
            thread.join(60)
    assert (wrong, results) == (0, [True] * 120)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("client_bytes = 5", {}),
        ("[weights]\n1000 = 300\n1001 = 1", {1000: 300, 1001: 1}),
        ("weights = 5", "weights = 5: must be a uid"),
        ("[weights]\nroot = 5", "root = 5: must be a uid and a whole number from 1 to 1000"),
        ("[weights]\n1000 = 0", "1000 = 0: must be a uid"),
        ("[weights]\n1000 = 1001", "1000 = 1001: must be a uid"),
        ("[weights]\n1000 = true", "1000 = True: must be a uid"),
    ],
)
def test_weights_of_accounts(text, found, tmp_path, monkeypatch):
    """~/.config/burst/limits.toml, beside the limits, which do not mind."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config/burst/limits.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=f"limits.toml: weights: .*{found}"):
            weights()
    else:
        assert weights() == found
        assert limits().device_bytes > 0


def test_the_weight_of_an_account_is_that_of_its_clients(kit, place):
    """What the administrator says about this account is what its clients are told."""
    path = Path(f"{place.path}-home/.config/burst/limits.toml")
    path.parent.mkdir(parents=True)
    path.write_text(f"[weights]\n{os.getuid()} = 7")
    with driver.connect("reference") as device, driver.connect("reference") as other:
        assert [d.stats()["weight"] for d in (device, other)] == [7, 7]


def niceness(pid):
    """Of the threads of a process, as `nice` counts."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return [int(words[16]) for words in stats]


def test_low_priority_gives_way_on_the_processors(place, kit):
    """The threads that execute a model of low priority, its burst's and those of the library, are nice to all others;
    those of an equal model of another priority are not.
    """
    pytest.importorskip("ai_edge_litert")
    m = driver.ModelBuilder()
    x = m.input("float32", (32, 1024))
    m.output(m.operation("FULLY_CONNECTED", x, np.ones((1024, 1024), np.float32), np.zeros(1024, np.float32), 0))
    model, bursts, found = m.build(), [], {}
    frame = np.ones((32, 1024), np.float32)
    with driver.connect("litert") as device:
        for priority in (HIGH, LOW):
            bursts += [device.prepare(model, priority=priority).burst() for _ in range(3)]
            for burst in bursts[-3:]:
                burst.run(frame)
            found[priority] = niceness(device.engine_pid)
    threads = 3 * min(2, os.cpu_count())  # the listeners, and the library's
    assert found[HIGH].count(10) == 0
    assert found[LOW].count(10) == threads
    assert found[LOW].count(0) == found[HIGH].count(0) >= threads
