"""What a client hands over is looked at, counted and paid by the client, and no wait for it is anybody else's."""

import gc
import mmap
import os
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from inside import lane_of
from silent_file import silent_file
from slow_to_close import SlowToClose
from waiting import PATIENCE

import driver
from burst import (
    Controller,
    GeneralFailure,
    InvalidArgument,
    Memory,
    Offer,
    PeerDied,
    Request,
    RequestArgument,
    ResourceExhaustedPersistent,
    ResourceExhaustedTransient,
    Result,
)
from burst.channel import Channel, close_all
from driver.engine import memory_import
from driver.engine.cache.compilations import CacheOwner, Declined, VerifiedCache
from driver.engine.ledger import Ledger
from driver.engine.limits import Limits
from driver.engine.memory_import import MemoryImporter
from driver.engine.quota import Quota
from driver.interface import CacheFiles
from driver.protocol.lane_codec import decode_outcome, encode_request, in_turn
from driver.protocol.ledger_report import LedgerReport
from driver.protocol.model_codec import InvalidModel, sealed
from fmq.region import guard

PAGE = mmap.PAGESIZE
LIMITS = Limits(client_bytes=1 << 20, device_bytes=1 << 20, account_pool_bytes=1 << 30)
X = np.ones((1, 4), np.float32)


def memfd(nbytes, written=True, flags=0):
    fd = os.memfd_create("handed over", os.MFD_CLOEXEC | flags)
    os.ftruncate(fd, nbytes)
    if written:
        os.posix_fallocate(fd, 0, nbytes)
    return fd


class Door:
    """A MemoryImporter for an account, and what it has counted."""

    def __init__(self, is_stranger, patience=PATIENCE):
        self.ledger = Ledger(LIMITS)
        self.quota = Quota(LIMITS.client_bytes, self.ledger.account(1).application())
        self.take = MemoryImporter(self.quota, patience, is_stranger=is_stranger)

    def held(self):
        return self.ledger.rows()[0].held


@pytest.fixture
def stranger():
    return Door(is_stranger=True)


@pytest.fixture
def friend():
    return Door(is_stranger=False)


@pytest.fixture
def file(tmp_path):
    """The descriptor of a file on a disk, of three pages: 1, 2 and 3."""
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([n]) * PAGE for n in (1, 2, 3)))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    yield fd
    os.close(fd)


@contextmanager
def silence(folder, *unanswered):
    """A file that answers everything but that."""
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can mount a file system of its own, and only where the kernel has FUSE")
    (folder / "silent").mkdir()
    with silent_file(folder / "silent", *unanswered) as path:
        yield path


@pytest.fixture
def silent(tmp_path):
    """A file that answers no read."""
    with silence(tmp_path, "READ") as path:
        yield path


def open_files():
    gc.collect()  # of the tests before
    return len(os.listdir("/proc/self/fd"))


class TestWhatIsTaken:
    """Across accounts: memory with all its pages, files on a disk for reading. Within one: all that can be mapped."""

    @pytest.mark.parametrize("kind", ["memfd", "posix"])
    def test_memory_with_all_its_pages(self, stranger, kind):
        """It is mapped in place."""
        source = Memory.create(3 * PAGE, None if kind == "memfd" else kind)
        source.asarray()[:] = 5
        found = stranger.take(source.to_wire(), os.dup(source.fd))
        source.asarray()[PAGE] = 6
        assert found.asarray()[[0, PAGE]].tolist() == [5, 6]

    @pytest.mark.parametrize("plain", [["ashmem", 4 * PAGE, False], ["mmap_fd", PAGE, 3, 0]])
    def test_holes_are_for_the_own_account(self, stranger, friend, plain):
        """Pages that are not there would be the engine's: they are refused, wherever they lie in the memory."""
        fd = memfd(4 * PAGE, written=False)
        os.pwrite(fd, bytes(PAGE), 0)
        with pytest.raises(InvalidArgument, match=r"has holes: .*posix_fallocate"):
            stranger.take(plain, os.dup(fd))
        assert friend.take(plain, fd).asarray()[0] == 0

    def test_a_file_for_reading_is_copied_once(self, stranger, friend, file):
        """What is written to it later is not seen; the copy is charged as memory of the client's, until it is gone."""
        plain = ["mmap_fd", PAGE, mmap.PROT_READ, PAGE]
        found = stranger.take(plain, os.dup(file))
        same = friend.take(plain, os.dup(file))
        assert (stranger.quota.taken, friend.quota.taken) == (PAGE, 0)
        assert stranger.held() == {"pool_bytes": PAGE, "mappings": 2, "bytes": PAGE}
        os.pwrite(file, b"\7", PAGE)
        assert (found.asarray()[0], same.asarray()[0]) == (2, 7)
        assert not found.asarray().flags.writeable
        del found
        assert (stranger.quota.taken, stranger.held()) == (0, {})

    @pytest.mark.parametrize("nbytes", [2 * PAGE + 1, 1 << 40])
    def test_a_file_that_is_too_short(self, stranger, file, nbytes):
        """It is refused before anything is charged."""
        with pytest.raises(GeneralFailure, match=r"mmap_fd cannot be read: .*the memory has only"):
            stranger.take(["mmap_fd", nbytes, mmap.PROT_READ, PAGE], os.dup(file))
        assert (stranger.quota.taken, stranger.held()) == (0, {})

    def test_a_copy_that_is_too_large(self, stranger, tmp_path):
        """It is refused with the limit of the engine's own memory."""
        with open(tmp_path / "large", "w+b") as large:
            large.truncate(1 << 31)
            with pytest.raises(ResourceExhaustedPersistent, match="client_bytes"):
                stranger.take(["mmap_fd", 1 << 31, mmap.PROT_READ, 0], os.dup(large.fileno()))
        assert (stranger.quota.taken, stranger.held()) == (0, {})

    @pytest.mark.parametrize("what", ["a file for writing", "a file as memory", "/dev/zero", "a socket", "a folder"])
    def test_nothing_else_comes_from_another_account(self, stranger, file, what, tmp_path):
        """Whatever else can be mapped, or cannot, is refused with the remedy, and its descriptor is closed."""
        plain = ["ashmem", PAGE, False] if what == "a file as memory" else ["mmap_fd", PAGE, 3, 0]
        before = open_files()
        opened = {"/dev/zero": "/dev/zero", "a folder": tmp_path}
        if what == "a socket":
            near, far = Channel.pair()
            with near, far:
                fd = os.dup(near.fileno())
        else:
            fd = os.open(opened[what], os.O_RDONLY) if what in opened else os.dup(file)
        with pytest.raises(GeneralFailure, match=r"shared memory \(memfd, POSIX\) and DMA-BUFs, and files on a local"):
            stranger.take(plain, fd)
        assert open_files() <= before

    @pytest.mark.parametrize("protection", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
    def test_a_file_that_may_not_answer_is_not_asked(self, stranger, tmp_path, protection):
        """A file of FUSE is refused without a question to whoever serves it, which would not be answered."""
        with silence(tmp_path, "READ", "STATFS", "GETATTR") as silent:
            with pytest.raises(GeneralFailure, match="files on a local disk"):
                stranger.take(["mmap_fd", PAGE, protection, 0], os.open(silent, os.O_RDWR))
            with pytest.raises(GeneralFailure, match="files on a local disk"):
                stranger.take(["ashmem", PAGE, False], os.open(silent, os.O_RDWR))

    @pytest.mark.parametrize("bytes_of", ["Memory", "MappedFd", "model"])
    def test_huge_pages_are_refused(self, bytes_of):
        """A mapping of huge pages would reach beyond its room, and could not be guarded: processes map none."""
        fd = memfd(2 << 20, written=False, flags=os.MFD_HUGETLB | os.MFD_ALLOW_SEALING)
        try:
            if bytes_of == "model":
                with pytest.raises(InvalidModel, match="huge pages"):
                    sealed([os.dup(fd)], [0, 4096])
            else:
                with pytest.raises(OSError, match="huge pages"):
                    Memory.adopt(os.dup(fd), PAGE, sealed=False) if bytes_of == "Memory" else Memory.from_fd(fd, PAGE)
        finally:
            os.close(fd)


class TestClaims:
    """What is mapped is counted, as long as it is mapped."""

    @pytest.mark.parametrize("is_stranger", [False, True])
    def test_counted_until_the_last_array_is_gone(self, is_stranger):
        """An array outlives the memory that it lies in, and so does the claim. What can be truncated needs a guard."""
        door = Door(is_stranger)
        sealed_, open_ = Memory.create(PAGE), Memory.create(PAGE, "posix")
        for pool in (sealed_, open_):
            pool.asarray()[:] = 1
        one, two = (door.take(pool.to_wire(), os.dup(pool.fd)) for pool in (sealed_, open_))
        assert door.held() == {"pool_bytes": 2 * PAGE, "mappings": 4, "guards": 1}
        array = two.asarray()
        del one, two
        assert door.held() == {"pool_bytes": PAGE, "mappings": 2, "guards": 1}
        del array
        assert door.held() == {}

    @pytest.mark.parametrize(
        "plain", [["ashmem", 2 * PAGE, False], ["mmap_fd", PAGE, 3, 1], ["no such kind", 1], ["ashmem"], []]
    )
    def test_what_is_refused_is_not_counted(self, friend, plain):
        """Nothing stays: no descriptor, no claim."""
        before = open_files()
        with pytest.raises((GeneralFailure, InvalidArgument)):
            friend.take(plain, memfd(PAGE))
        assert (open_files(), friend.held()) == (before, {})

    def test_more_than_the_account_may_have_is_not_mapped(self, friend):
        """It is refused by the bytes that it says before they are mapped: addresses are a table of the process, too."""
        gc.collect()
        with pytest.raises(ResourceExhaustedPersistent, match=r"account_pool_bytes = 1073741824 is reached"):
            friend.take(["mmap_fd", 1 << 46, 3, 0], memfd(1 << 46, written=False))
        assert friend.held() == {}


def test_a_file_that_is_read_too_slowly(silent, monkeypatch, kit):
    """The client gets an error after its time, and so does its next file; when the file answers, all is free again."""
    monkeypatch.setattr(memory_import, "backing_of", lambda _: memory_import.Backing.DISK)  # as a disk that hangs
    door, plain, before = Door(is_stranger=True, patience=0.2), ["mmap_fd", PAGE, mmap.PROT_READ, 0], open_files()
    with pytest.raises(GeneralFailure, match=r"was not read within 0\.2 s \(file_seconds\)"):
        door.take(plain, os.open(silent, os.O_RDONLY))
    silent.await_asked("READ")
    assert (door.held(), door.quota.taken) == ({"threads": 1}, 0)
    with pytest.raises(ResourceExhaustedTransient, match=r"has taken more than 0\.2 s"):
        door.take(plain, os.open(__file__, os.O_RDONLY))
    silent.server.kill()
    kit.until(lambda: (door.held(), open_files()) == ({}, before))


def test_cache_files_that_may_not_answer_are_not_written(tmp_path):
    """Cache files of another account lie in memory or on a disk; one of FUSE is declined, and not asked."""
    device = SimpleNamespace(name="unit", version="1", cache_files=CacheFiles(1, 0))
    cache = VerifiedCache(device, "unit")
    with silence(tmp_path, "READ", "WRITE", "STATFS", "GETATTR") as silent:
        fds = [os.open(silent, os.O_RDWR), memfd(PAGE)]
        with pytest.raises(Declined, match="caches in memory and on local disks"):
            cache.saving(CacheOwner(os.getuid() + 1, bytes(32)), fds)
        close_all(fds)


def test_a_file_that_is_sent_where_none_belongs_holds_nobody(own, kit, tmp_path):
    """One thread takes the messages of all bursts' contexts. A file that cannot be closed ends its own burst there; the
    memory of others is freed, and their bursts begin and end.
    """
    hostile, honest = own("hostile"), own("honest")
    with hostile.prepare(kit.add_model()) as prepared, silence(tmp_path, "FLUSH") as silent:
        context, far = Channel.pair()
        fd, configure = os.open(silent, os.O_RDWR), prepared.configure_burst(0.0)

        def with_ours(offer):
            with far:
                return configure(Offer(*offer[:4], far, offer.versions))

        with context, Controller(with_ours), pytest.raises(PeerDied):  # as it is sent, where the kernel can refuse it
            context.call(["free_memory"], [fd], PATIENCE)
        works(honest, kit.add_model())
        with honest.prepare(kit.add_model()) as own_, own_.burst() as other:
            frees(other, honest, kit)
        silent.server.kill()
        close_all([fd])


def test_more_descriptors_than_fit_hold_nobody(own, kit):
    """A message with more descriptors than a channel takes, which lies in a burst's context before the device can
    refuse any: the last one of them, a socket that lingers, is not closed by the thread of all contexts.
    """
    hostile, honest = own("hostile"), own("honest")
    slow = SlowToClose()
    with hostile.prepare(kit.add_model()) as prepared, open(os.devnull) as file:
        context, far = Channel.pair()
        configure = prepared.configure_burst(0.0)
        context.send(["free_memory"], [file.fileno()] * 99 + [slow.fileno()])
        slow.leave()

        def with_ours(offer):
            with far:
                return configure(Offer(*offer[:4], far, offer.versions))

        with context, Controller(with_ours), honest.prepare(kit.add_model()) as own_, own_.burst() as other:
            frees(other, honest, kit)
    slow.close()


def frees(burst, device, kit):
    """The device takes notice of memory that a burst frees."""
    pool = Memory.create(PAGE)
    pool.asarray(np.float32)[:4] = 1
    request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
    assert burst.execute(request).status == 0
    assert engine_maps(device, pool)
    burst.free_memory(pool)
    kit.until(lambda: not engine_maps(device, pool))


def engine_maps(device, pool):
    return f" {os.fstat(pool.fd).st_ino} " in Path(f"/proc/{device.engine_pid}/maps").read_text()


def test_a_close_that_fails_leaks_no_other_descriptor(silent):
    """Who serves a file can have its close fail: all others that came with it are closed all the same."""
    before, fds = open_files(), [os.open(silent, os.O_RDWR) for _ in range(3)]
    silent.server.kill()
    silent.server.wait()
    with pytest.raises(OSError, match="not connected"):
        os.close(fds.pop())
    close_all(fds)
    assert (open_files(), fds) == (before, [])


# ---- a device, and clients of the same account


@pytest.fixture
def own(place):
    """Connects to a device of this test alone, as an application."""
    made = []

    def connect(application):
        made.append(driver.connect("reference", application=application))
        return made[-1]

    yield connect
    for device in made:
        device.close()


def register(channel, slot, plain, fd):
    channel.send(["memory", slot, plain], [fd])


def answer(channel, prepared, slot):
    """Status and text of an execution on that slot."""
    request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (Memory.create(PAGE),))
    channel.send_raw(in_turn(1, None, encode_request(prepared.home.number, request, [slot], measure=False)))
    found = Result(*decode_outcome(channel.receive(PATIENCE).raw[10:]))
    return found.status, found.message


def mappings(device):
    with open(f"/proc/{device.engine_pid}/maps") as maps:
        return sum(1 for _ in maps)


def works(device, model):
    """It prepares a model, and executes it on both paths."""
    with device.prepare(model) as prepared, prepared.burst() as burst:
        assert prepared.run(X)[0].tolist() == burst.run(X).outputs[0].tolist() == [[2, 2, 2, 2]]


def test_memory_that_may_be_truncated_is_mapped_anew(friend):
    """Where its pages were cut off, the mapping of before has zeros for ever; the same memory, cut off and filled again
    since, reads as its client wrote it. Memory of a sealed size is mapped once.
    """
    guard()
    fd = memfd(2 * PAGE)
    memory = Memory.adopt(os.dup(fd), 2 * PAGE, sealed=False)
    before = friend.take(memory.to_wire(), os.dup(fd))
    os.ftruncate(fd, 0)
    assert not before.asarray().any()
    os.ftruncate(fd, 2 * PAGE)
    os.pwrite(fd, bytes([9]) * 2 * PAGE, 0)
    assert (friend.take(memory.to_wire(), os.dup(fd)).asarray() == 9).all()
    os.close(fd)
    sealed = Memory.create(PAGE)
    first = friend.take(sealed.to_wire(), os.dup(sealed.fd))
    assert friend.take(sealed.to_wire(), os.dup(sealed.fd)) is first


def test_one_application_maps_no_more_pools_than_it_may(own, kit):
    """Ten thousand pages are registered, of which all but a few thousand are refused with the figure; others go on."""
    hostile, honest = own("hostile"), own("honest")
    before, fd = mappings(hostile), memfd(10_000 * PAGE, written=False)
    with hostile.prepare(kit.add_model()) as prepared, lane_of(hostile) as channel:
        for slot in range(10_000):
            register(channel, slot, ["mmap_fd", PAGE, 3, slot * PAGE], fd)
        status, text = answer(channel, prepared, 9_999)
        assert (status, text[:72]) == (12, "") or "account_mappings" in text or "account_guards" in text, text
        assert answer(channel, prepared, 0) == (0, "")
        assert mappings(hostile) - before < 13_000
        works(honest, kit.add_model())
    os.close(fd)


def test_memory_is_mapped_and_counted_once(own, kit):
    """Whatever ways it comes: plain, asynchronous and fenced executions, and bursts."""
    device = own("one")
    pool = Memory.create(2 * PAGE)
    pool.asarray(np.float32)[:4] = 1
    request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))

    def held():
        rows = [row for row in LedgerReport.read(device.call, "engine").rows if row.application == "one"]
        return rows[0].held.get("pool_bytes", 0)

    def mapped():
        with open(f"/proc/{device.engine_pid}/maps") as maps:
            return sum(row.split()[4] == str(os.fstat(pool.fd).st_ino) for row in maps)

    with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst, prepared.burst() as other:
        for execute in (burst.execute, other.execute, prepared.execute):
            assert execute(request).status == 0
        assert prepared.execute_async(request).result(PATIENCE).status == 0
        assert prepared.execute_fenced(request).result(PATIENCE).status == 0
        assert (held(), mapped()) == (2 * PAGE, 1)


def test_one_application_takes_no_more_addresses_than_it_may(own, kit):
    """105 sparse pools of 2**46, 2**45, … bytes are refused one by one; the neighbour opens a burst meanwhile."""
    hostile, honest = own("hostile"), own("honest")
    fd = memfd(1 << 46, written=False)
    with hostile.prepare(kit.add_model()) as prepared, lane_of(hostile) as channel:
        sizes = [1 << bits for bits in range(46, 20, -1) for _ in range(4)]
        for slot, size in enumerate(sizes):
            register(channel, slot, ["mmap_fd", size, 3, 0], fd)
        assert "account_pool_bytes" in answer(channel, prepared, 0)[1]
        works(honest, kit.add_model())
    os.close(fd)


def test_one_application_takes_no_more_guards_than_it_may(own, kit):
    """5,000 pools that could be truncated, more than the process can guard: the neighbour's POSIX memory is mapped."""
    hostile, honest = own("hostile"), own("honest")
    fd = memfd(5_000 * PAGE, written=False)
    with hostile.prepare(kit.add_model()) as prepared, lane_of(hostile) as channel:
        for slot in range(5_000):
            register(channel, slot, ["mmap_fd", PAGE, 3, slot * PAGE], fd)
        assert "account_guards" in answer(channel, prepared, 4_999)[1]
        pool = Memory.create(PAGE, "posix")
        pool.asarray(np.float32)[:4] = 1
        request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
        with honest.prepare(kit.add_model()) as own_, own_.burst() as burst:
            for execute in (own_.execute, burst.execute):
                assert execute(request).status == 0
            assert pool.asarray(np.float32, (4,), 16).tolist() == [2] * 4
    os.close(fd)


def handing_over(path, device, prepared, burst, fd):
    """Hands a file over, on one of the ways in; the outcome, or an error."""
    pool = Memory.from_fd(fd, PAGE)
    request = Request((RequestArgument(length=16),), (RequestArgument(offset=16, length=16),), (pool,))
    try:
        if path == "copy":
            with device.allocate(driver.BufferDesc(), [prepared], [driver.BufferRole(0, 0)]) as buffer:
                return device.call("copy_from", buffer.token, [1, 4], pool.to_wire(), fds=[fd])
        return (burst if path == "burst" else prepared).execute(request)
    except (driver.StatusError, ConnectionError) as error:
        return error


@pytest.mark.integration
@pytest.mark.parametrize("unanswered", ["READ", "FLUSH"])
@pytest.mark.parametrize("path", ["burst", "plain", "copy"])
def test_a_file_that_does_not_answer_holds_its_own_client_alone(own, kit, path, unanswered, tmp_path):
    """While the engine waits for a page of it, or closes it, others prepare and execute; the engine outlives the file's
    server.
    """
    slow, honest, ended = own("slow"), own("honest"), []
    with slow.prepare(kit.add_model()) as prepared, prepared.burst() as burst, silence(tmp_path, unanswered) as silent:
        fd, engine = os.open(silent, os.O_RDWR), slow.engine_pid
        work = partial(handing_over, path, slow, prepared, burst, fd)
        waiting = threading.Thread(target=lambda: ended.append(work()))
        waiting.start()
        silent.await_asked(unanswered)
        for _ in range(3):
            works(honest, kit.add_model())
        assert not ended
        silent.server.kill()
        waiting.join(PATIENCE)
        assert ended
        works(honest, kit.add_model())
        assert honest.engine_pid == engine
        close_all([fd])
