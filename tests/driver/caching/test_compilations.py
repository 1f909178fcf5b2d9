"""What a device has kept comes back, after any death and whatever was done meanwhile; and nothing else ever does."""

import contextlib
import fcntl
import os
import random
import re
import resource
import signal
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import stress
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kills import kill
from waiting import last

import driver
from burst import GeneralFailure, InvalidArgument, PeerDied, StatusError
from driver.engine.cache import compilations, records
from driver.engine.cache.compilations import CacheOwner, Declined, VerifiedCache
from driver.interface import CacheFiles, Saved
from driver.options import Cache
from driver.protocol.model_codec import encode
from driver.vts.cache_files import CacheFileSet, corrupted, extensions, flips, truncations

X = np.full((1, 4), 3, np.float32)
WHERE = 100, 20
MEGABYTES = 40


def check_runs(prepared):
    assert prepared.run(X)[0].tolist() == [[4.0] * 4]


def check_restores(device, model, files):
    with device.prepare_from_cache(model, files.cache()) as restored:
        check_runs(restored)


def keep(device, model, files):
    with device.prepare(model, cache=files.cache()) as prepared:
        check_runs(prepared)
        return prepared.home.declined


@contextlib.contextmanager
def kept(device, model):
    """Files that hold the model, freed on the device."""
    with CacheFileSet(device.number_of_cache_files_needed()) as files:
        assert keep(device, model, files) == ""
        yield files


@pytest.fixture
def device(home, kit):
    """The reference, in a process that the tests of this file share."""
    with kit.living("reference") as device:
        yield device


class TestUnit:
    """Without a process: the device's side by itself."""

    @pytest.fixture(autouse=True)
    def _home(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        self.state = tmp_path / ".local/state/burst"

    @pytest.fixture
    def files(self):
        with CacheFileSet(CacheFiles(1, 1)) as files:
            yield files

    def opened(self, version="1"):
        """As a device that was just started."""
        return VerifiedCache(SimpleNamespace(name="unit", version=version, cache_files=CacheFiles(1, 0)), "unit")

    def save(self, device, files, content=b"code" * 5000, uid=1):
        saving = device.saving(CacheOwner(uid, files.token), files.fds)
        saving.save(memoryview(b"model" * 4000), WHERE, Saved([content]))
        return saving

    def restored(self, device, files, uid=1):
        """What it gives, which has to be what was saved."""
        found = device.restored(CacheOwner(uid, files.token), files.counts, files.fds)
        assert bytes(found.model.asarray()) == b"model" * 4000
        assert found.where == WHERE
        return bytes(found.saved.model[0])

    def check_refused(self, device, files, words, uid=1):
        with pytest.raises(GeneralFailure, match=words):
            self.restored(device, files, uid)

    def test_it_comes_back(self, files):
        """On the device that wrote it, and on the next one."""
        device = self.opened()
        self.save(device, files)
        for each in (device, self.opened()):
            assert self.restored(each, files) == b"code" * 5000

    @pytest.mark.parametrize("what", ["__version__", "processor", "device"])
    def test_forgotten_with_another_build(self, files, monkeypatch, what):
        """Of this library, of the processor or of the device's driver; and not remembered when the old one is back,
        once the other has kept something."""
        self.save(self.opened(), files)
        with monkeypatch.context() as changed:
            if what != "device":
                changed.setattr(records, what, "another" if what == "__version__" else lambda: "another")
            other = self.opened("2" if what == "device" else "1")
            self.check_refused(other, files, "no record of writing them")
            with CacheFileSet(files.counts) as others:
                self.save(other, others)
                assert self.restored(other, others) == b"code" * 5000
        self.check_refused(self.opened(), files, "no record of writing them")

    def test_records_of_one_user_are_not_anothers(self, files):
        """Files are nothing to another user under the same token; what he keeps takes nothing from the first."""
        device = self.opened()
        self.save(device, files, uid=1)
        self.check_refused(device, files, "no record of writing them", uid=2)
        with CacheFileSet(files.counts, files.token) as others:
            self.save(device, others, b"another" * 3000, uid=2)
            self.check_refused(device, others, "a file has|have changed", uid=1)
            assert self.restored(device, others, uid=2) == b"another" * 3000
        assert self.restored(device, files, uid=1) == b"code" * 5000

    def test_an_account_crowds_out_no_records_of_another(self, files, monkeypatch):
        """It keeps more compilations than the device has records for: those that it forgets are its own."""
        monkeypatch.setattr(records, "MOST_RECORDS", 8)
        device = self.opened()
        self.save(device, files, uid=1)
        with CacheFileSet(files.counts) as first:
            self.save(device, first, uid=2)
            for _ in range(40):
                with CacheFileSet(files.counts) as others:
                    self.save(device, others, uid=2)
            self.check_refused(device, first, "no record of writing them", uid=2)
        assert self.restored(device, files, uid=1) == b"code" * 5000

    def test_a_copied_record_is_nothing_to_another_user(self, files):
        """The digest covers the user and the token, so that a record cannot be moved from one to the other."""
        device = self.opened()
        self.save(device, files, uid=1)
        found = device._opened(1).get(1, files.token)
        with CacheFileSet(files.counts) as others:
            others.write(files.read())
            device._opened(2).put(2, files.token, found)
            device._opened(1).put(1, others.token, found)
            self.check_refused(device, files, "have changed", uid=2)
            self.check_refused(device, others, "have changed", uid=1)

    @pytest.mark.parametrize("content", [b"", b"\0" * 32, b"SQLite format 3\0" + b"\xff" * 4096])
    def test_a_damaged_store_is_an_empty_one(self, files, content):
        """Nothing is restored, and what is kept from then on is."""
        self.save(self.opened(), files)
        for path in self.state.glob("unit.1.records*"):
            path.unlink()
        (self.state / "unit.1.records").write_bytes(content)
        device = self.opened()
        self.check_refused(device, files, "no record of writing them")
        self.save(device, files)
        assert self.restored(self.opened(), files) == b"code" * 5000

    def test_another_key_makes_all_records_void(self, files):
        """Who has no key, or another one, cannot have written a record."""
        self.save(self.opened(), files)
        key = self.state / "key"
        assert key.stat().st_mode & 0o777 == 0o600
        key.unlink()
        key.write_bytes(bytes(32))
        key.chmod(0o600)
        self.check_refused(self.opened(), files, "have changed")

    @pytest.mark.parametrize("wrong", ["mode", "length", "link"])
    def test_a_key_that_others_may_know_is_not_used(self, files, wrong):
        """It is named, and what to do; nothing is kept, and nothing restored."""
        self.save(self.opened(), files)
        key = self.state / "key"
        if wrong == "mode":
            key.chmod(0o644)
        elif wrong == "length":
            key.write_bytes(bytes(33))
        else:
            key.rename(key.with_name("other"))
            key.symlink_to("other")
        with pytest.raises(OSError, match="key"):
            self.save(self.opened(), files)
        self.check_refused(self.opened(), files, "key")

    def test_it_grows_in_place(self, files):
        """What is saved again lies behind what was there, and is what comes back; whatever moment it is cut off at, the
        old one or the new one does."""
        device = self.opened()
        saving, old = self.save(device, files, b"quick" * 3000), files.read()
        saving.save(memoryview(b"model" * 4000), WHERE, Saved([b"better" * 3000]))
        new = files.read()
        assert [b.startswith(a) for a, b in zip(old, new, strict=True)] == [True, True]
        assert self.restored(self.opened(), files) == b"better" * 3000

    def test_cut_off_while_it_grows(self, files, monkeypatch):
        """Killed after any of its writes, a device restores what it had before, and after the last one the new one."""
        stops = []

        def write(fd, offset, content):
            if len(stops) == 1:
                os.pwrite(fd, bytes(content)[: len(content) // 2], offset)
                raise KeyboardInterrupt
            if stops:
                stops.pop()
            real(fd, offset, content)

        real = compilations._write
        for before in (1, 2):  # a write into the first file, and one into the second
            saving = self.save(self.opened(), files, b"quick" * 3000)
            with monkeypatch.context() as context:
                context.setattr(compilations, "_write", write)
                stops[:] = [None] * before
                with pytest.raises(KeyboardInterrupt):
                    saving.save(memoryview(b"model" * 4000), WHERE, Saved([b"better" * 3000]))
            assert self.restored(self.opened(), files) == b"quick" * 3000

    def test_locked_by_somebody_else(self, files, monkeypatch):
        """Neither saving nor restoring waits for ever."""
        monkeypatch.setattr(compilations, "_PATIENCE", 0.01)
        device = self.opened()
        self.save(device, files)
        fd = files.reopened(1, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            self.check_refused(device, files, "another process has locked")
            with pytest.raises(Declined, match="another process"):
                self.save(device, files)
        finally:
            os.close(fd)
        assert self.restored(device, files) == b"code" * 5000

    def test_restored_while_it_grows(self, files, monkeypatch):
        """By the same descriptors, which share their locks: a save between the record and the files is no damage."""
        device = self.opened()
        saving = self.save(device, files, b"quick" * 3000)

        def check_lengths(record, fds):
            if not record.offsets[0]:
                saving.save(memoryview(b"model" * 4000), WHERE, Saved([b"better" * 3000]))
            real(record, fds)

        real = compilations._check_lengths
        monkeypatch.setattr(compilations, "_check_lengths", check_lengths)
        assert self.restored(device, files) == b"better" * 3000

    def test_several_threads_on_the_same_files(self, files):
        """Restore them at the same time, each what was saved."""
        device, found = self.opened(), []
        self.save(device, files)
        threads = [threading.Thread(target=lambda: found.append(self.restored(device, files))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [b"code" * 5000] * 8


def test_every_damage_is_refused(device, kit):
    """To the reference's one file, which holds data: this device verifies that, too."""
    with kept(device, kit.add_model()) as files:
        contents = files.read()
        changes = [*truncations(contents), *extensions(contents), *flips(contents, 60)]
        for change in [*changes, *(corrupted(contents, seed) for seed in range(100))]:
            if change.content != contents[0]:
                check_refused(device, kit.add_model(), files, change.content)
        files.write(contents)
        check_restores(device, kit.add_model(), files)


def check_refused(device, model, files, content):
    files.write([content])
    with pytest.raises(GeneralFailure, match="the device does not use the cache files"):
        device.prepare_from_cache(model, files.cache())


@pytest.mark.stress
def test_ten_thousand_corruptions(device, kit, tally):
    """At random, or as many as the budget allows: none is restored."""
    with kept(device, kit.add_model()) as files:
        contents = files.read()
        for seed in range(stress.times(10_000)):
            content = corrupted(contents, seed).content
            if content != contents[0]:
                check_refused(device, kit.add_model(), files, content)


@pytest.mark.integration
def test_records_survive_the_device(place, kit):
    """Killed or retired, its next life restores what it has kept."""
    with kit.living("reference") as device, kept(device, kit.add_model()) as files:
        kill(device, "both")
        with kit.living("reference") as second:
            assert second.engine_pid != device.engine_pid
            check_restores(second, kit.add_model(), files)
        kit.until(lambda: not place.pids())
        with kit.living("reference") as third:
            check_restores(third, kit.add_model(), files)


def test_what_a_device_fails_to_keep_is_no_failure(home, kit):
    """The model is prepared, and it says why it was not kept."""
    with (
        kit.living(kit.odd("Unkept")) as device,
        CacheFileSet(device.number_of_cache_files_needed()) as files,
        device.prepare(kit.add_model(), cache=files.cache()) as prepared,
    ):
        check_runs(prepared)
        assert prepared.home.declined == "the device failed to serialise the model: this fails on purpose"


def test_no_room(device, kit):
    """A disk that is full while the files are written: the model is prepared, and not kept; with room it is."""
    model = large_model(2**15)
    with CacheFileSet(device.number_of_cache_files_needed()) as files:
        with no_file_larger_than(2**16, device):
            with device.prepare(model, cache=files.cache()) as prepared:
                assert "File too large" in prepared.home.declined
                assert prepared.run(np.zeros(2**15, np.float32))[0].sum() == 2**15
            with pytest.raises(GeneralFailure):
                device.prepare_from_cache(model, files.cache())
        with device.prepare(model, cache=files.cache()) as prepared:
            assert prepared.home.declined == ""
        with device.prepare_from_cache(model, files.cache()) as restored:
            assert restored.run(np.zeros(2**15, np.float32))[0].sum() == 2**15


@contextlib.contextmanager
def no_file_larger_than(nbytes, device):
    """In the device's engine, whatever it writes."""
    limits = resource.prlimit(device.engine_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(device.engine_pid, resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(device.engine_pid, resource.RLIMIT_FSIZE, limits)


def test_no_room_for_a_record(place, kit):
    """What would be forgotten with the device is not said to be kept; what was kept before is not forgotten."""
    with driver.connect() as device, kept(device, kit.add_model()) as before:
        with no_file_larger_than(2**11, device), CacheFileSet(before.counts) as files:
            assert "reference.records: cannot be written" in keep(device, kit.add_model(), files)
        kill(device, "both")
        with kit.living("reference") as successor, kept(successor, kit.add_model()) as files:
            check_restores(successor, kit.add_model(), before)
            check_restores(successor, kit.add_model(), files)


def test_nowhere_to_remember(place, kit, monkeypatch):
    """A home in which nothing can be made: the device prepares and says so, and restores nothing."""
    monkeypatch.setenv("HOME", "/proc/no-home")
    with driver.connect() as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
        assert "/proc/no-home" in keep(device, kit.add_model(), files)
        with pytest.raises(GeneralFailure, match="/proc/no-home"):
            device.prepare_from_cache(kit.add_model(), files.cache())


def large_model(count):
    """x + 1, with a constant of so many elements."""
    builder = driver.ModelBuilder()
    builder.output(builder.operation("ADD", builder.input("float32", (count,)), np.ones(count, np.float32), 0))
    return builder.build()


def anonymous_megabytes(pid):
    """Of the process's private memory, all that is resident."""
    return int(re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def test_one_copy_for_all_clients(place, kit):
    """Eight clients restore one entry: its weights are in memory once, and gone with the last of them."""
    model = large_model(MEGABYTES << 18)
    with contextlib.ExitStack() as stack:
        device = stack.enter_context(driver.connect())
        files = stack.enter_context(CacheFileSet(device.number_of_cache_files_needed()))
        device.prepare(model, cache=files.cache()).close()
        kit.until(lambda: "memfd:burst-model" not in Path(f"/proc/{device.engine_pid}/maps").read_text())
        before = anonymous_megabytes(device.engine_pid)
        with contextlib.ExitStack() as clients:
            for _ in range(8):
                other = clients.enter_context(driver.connect())
                clients.enter_context(other.prepare_from_cache(model, files.cache()))
            assert MEGABYTES * 0.95 < anonymous_megabytes(device.engine_pid) - before < MEGABYTES * 1.05 + 4
        kit.until(lambda: anonymous_megabytes(device.engine_pid) - before < MEGABYTES * 0.2)


@pytest.mark.integration
def test_restoring_while_bursts_run(device, kit):
    """Results of another client's burst are right and in order, however often models are restored beside it."""
    ends, failures = threading.Event(), []

    def stream():
        try:
            with kit.living("reference") as other, other.prepare(kit.add_model(2.0)) as prepared:
                run(prepared)
        except BaseException as error:  # noqa: BLE001 (of a thread, for the test to see)
            failures.append(error)

    def run(prepared):
        with prepared.burst(depth=4) as burst:
            n = 0
            while not ends.is_set() or n < 20:
                futures = [burst.submit(np.full((1, 4), n + k, np.float32)) for k in range(4)]
                for k, future in enumerate(futures):
                    assert future.result(kit.patience).outputs[0].tolist() == [[n + k + 2.0] * 4]
                n += 4

    thread = threading.Thread(target=stream)
    with kept(device, kit.add_model()) as files:
        thread.start()
        for _ in range(100):
            check_restores(device, kit.add_model(), files)
        ends.set()
        thread.join()
    assert failures == []


CLIENTS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import driver
from small_models import add_model
from driver.vts.cache_files import CacheFileSet
for line in sys.stdin:
    if not (child := os.fork()):
        with driver.connect() as device, CacheFileSet(device.number_of_cache_files_needed()) as files:
            while True:
                device.prepare(add_model(), cache=files.cache()).close()
                device.prepare_from_cache(add_model(), files.cache()).close()
    print(child, flush=True)
    os.waitpid(child, 0)
"""


@contextlib.contextmanager
def clients(kit):
    """A function that starts a process which keeps and restores all the time, and gives its number."""
    with kit.python(CLIENTS, Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as source:

        def start():
            source.stdin.write(b"\n")
            source.stdin.flush()
            return int(source.stdout.readline())

        yield start
        source.stdin.close()


def kill_a_device(kit, source):
    """While a thread keeps a model and restores it, again and again."""
    device = kit.living("reference")

    def work():
        with CacheFileSet(device.number_of_cache_files_needed()) as files, contextlib.suppress(PeerDied):
            while True:
                keep(device, kit.add_model(), files)
                check_restores(device, kit.add_model(), files)

    thread = threading.Thread(target=work)
    thread.start()
    last(source.random() * 0.03)
    kill(device, "both")
    thread.join(kit.patience)
    assert not thread.is_alive()
    device.close()


@pytest.mark.integration
@pytest.mark.parametrize("rounds", [15, pytest.param(stress.times(1000), marks=pytest.mark.stress)])
def test_killed_at_random_moments(home, kit, rounds):
    """Devices and clients, while models are kept and restored: what was kept before is restored every time, and the
    next model is kept and restored. Every fourth kill is a device's.
    """
    source = random.Random(rounds)
    with kit.living("reference") as device, kept(device, kit.add_model()) as first, clients(kit) as start:
        for n in range(rounds):
            if n % 4 == 0:
                kill_a_device(kit, source)
            else:
                child = start()
                last(source.random() * 0.05)
                os.kill(child, signal.SIGKILL)
            with kit.living("reference") as successor:
                check_restores(successor, kit.add_model(), first)
                with kept(successor, kit.add_model()) as files:
                    check_restores(successor, kit.add_model(), files)


NUMBERS = st.integers(-(2**63), 2**64 - 1)
plain = st.none() | st.booleans() | NUMBERS | st.floats() | st.text(max_size=9) | st.binary()
anything = st.recursive(plain, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
COUNTS = st.lists(st.integers(-2, 3), min_size=2, max_size=2) | st.lists(NUMBERS, max_size=3) | anything
TOKENS = st.binary(min_size=32, max_size=32) | st.binary(max_size=40) | anything
FDS = st.lists(st.sampled_from(["file", "empty", "read", "null", "folder", "pipe"]), max_size=4)


def descriptors(kinds, files, stack):
    for kind in kinds:
        match kind:
            case "file":
                found = os.dup(files.fds[0])
            case "empty":
                found = os.memfd_create("empty")
            case "read":
                found = files.reopened(0, os.O_RDONLY)
            case "pipe":
                found, other = os.pipe()
                stack.callback(os.close, other)
            case _:
                found = os.open("/dev/null" if kind == "null" else "/", os.O_RDONLY)
        stack.callback(os.close, found)
        yield found


@pytest.fixture
def fuzzed(device, kit):
    """A device that lives, what it has kept, and how many descriptors it has then."""
    with kept(device, kit.add_model()) as files:
        folder = Path(f"/proc/{device.engine_pid}/fd")
        before = len(list(folder.iterdir()))
        yield device, files
        check_restores(device, kit.add_model(), files)
        kit.until(lambda: len(list(folder.iterdir())) <= before + 2)


FUZZED = settings(
    max_examples=120,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZED
@given(counts=COUNTS, token=TOKENS, kinds=FDS)
def test_any_arguments_of_restore(fuzzed, counts, token, kinds):
    """Get a status, and cost the device neither its life nor a descriptor."""
    device, files = fuzzed
    with contextlib.ExitStack() as stack, pytest.raises(StatusError):
        device.call("restore", counts, token, fds=list(descriptors(kinds, files, stack)), timeout=10)


@FUZZED
@given(counts=COUNTS, token=TOKENS, kinds=FDS)
def test_any_arguments_of_prepare(fuzzed, kit, counts, token, kinds):
    """The model is prepared, or refused for what is said about it; what was kept before stays kept."""
    device, files = fuzzed
    with contextlib.ExitStack() as stack:
        model = encode(kit.add_model())
        where = model.where
        fds = [*model.fds, *descriptors([kind for kind in kinds if kind != "file"], files, stack)]
        with contextlib.suppress(InvalidArgument):
            (number, *_), _ = device.call("prepare", where, counts, token, fds=fds, timeout=10)
            device.call("free", number)


def test_more_files_than_a_message_holds(device, kit):
    """Are refused here, before anything is sent; the device is none the worse."""
    with kept(device, kit.add_model()) as files:
        cache = Cache(files.token, (), files.fds * 100)
        with pytest.raises((driver.DriverError, ValueError, OSError)):
            device.prepare_from_cache(kit.add_model(), cache)
    with kit.living("reference") as again, again.prepare(kit.add_model()) as prepared:
        check_runs(prepared)
