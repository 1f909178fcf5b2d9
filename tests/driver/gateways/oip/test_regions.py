"""Shared memory that clients register: which is taken, what is refused, and what a client may do to it later."""

import gc
import os
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import accounts
import numpy as np
import pytest
from oip_models import client_memory, rows
from tritonclient.utils import InferenceServerException, shared_memory
from waiting import PATIENCE

from driver.gateways.oip.regions import RegionLimits, RegionSlice, RegionTable
from driver.gateways.refusal import Refusal

NBYTES = rows().nbytes
PAGE = os.sysconf("SC_PAGESIZE")


@contextmanager
def shm_file(nbytes=PAGE, mode=0o600):
    """A file of this account in /dev/shm."""
    path = Path("/dev/shm") / f"burst-oip-{uuid.uuid4().hex}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    os.ftruncate(fd, nbytes)
    os.close(fd)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@pytest.fixture
def table():
    made = RegionTable(os.getuid(), RegionLimits(most=3, nbytes=4 * PAGE))
    yield made
    made.close()


def refusal(table, key, offset=0, nbytes=PAGE, name="region"):
    """What is said of a region, with its name, which differs from one to the next, left out."""
    with pytest.raises(Refusal) as error:
        table.register(name, key, offset, nbytes)
    assert table.status("") == []
    return error.value.text.replace(repr(name), "")


class Knows:
    """A watcher to which another connection unregisters a region while it is told of it."""

    def __init__(self, table):
        self.table, self.regions, self.descriptors = table, [], []

    def region_ready(self, region):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(self.table.unregister, region.name).result()
        self.descriptors.append(os.fstat(region.memory.fd).st_size)
        self.regions.append(region)

    def region_gone(self, region):
        if region in self.regions:
            self.regions.remove(region)

    def region_used(self, region):
        return 0.0


def test_a_region_that_ends_as_it_begins(table):
    """Its memory is open while watchers are told of it, they know it no longer, and its room is there again."""
    table.watchers.append(watcher := Knows(table))
    for _ in range(4):
        with shm_file() as path:
            table.register("r", path.name, 0, PAGE)
    assert (watcher.regions, watcher.descriptors) == ([], [PAGE] * 4)


def are_mapped(keys):
    """Whether this process, which is the server's and the client's, has mapped one of them."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return any(line.removesuffix(" (deleted)").endswith(tuple(keys)) for line in maps)


class TestRefused:
    def test_one_text_for_everything(self, table, tmp_path):
        """Paths, links, other kinds of files, other sizes, no file at all: one text, and nothing is registered."""
        shm = Path("/dev/shm")
        names = [shm / f"burst-oip-{uuid.uuid4().hex}" for _ in range(4)]
        secret = tmp_path / "secret"
        secret.write_bytes(bytes(PAGE))
        names[0].symlink_to(secret)
        os.mkfifo(names[1])
        names[2].mkdir()
        try:
            with shm_file() as path:
                names[3].symlink_to(path.name)
                key = path.name
                texts = {
                    *(refusal(table, name.name) for name in names),
                    *(refusal(table, word) for word in ("", "/", ".", "..", "a\0b", "x" * 256)),
                    *(refusal(table, word) for word in ("/../../etc/passwd", f"../shm/{key}", f"//{key}")),
                    refusal(table, "burst-no-such-file"),
                    refusal(table, key, 0, PAGE + 1),
                    refusal(table, key, 1, PAGE),
                    refusal(table, key, PAGE, 1),
                    refusal(table, key, 0, 0),
                    refusal(table, key, 2**63, 2**63),
                    refusal(table, key, -PAGE, PAGE),
                    refusal(table, key, 0, -1),
                    refusal(table, key, 0, 2**64 - 1),
                    refusal(table, key, 0, 5 * PAGE),
                }
            assert len(texts) == 1
        finally:
            for name in (names[0], names[1], names[3]):
                name.unlink(missing_ok=True)
            names[2].rmdir()

    def test_of_another_account(self, table):
        """A file that belongs to another account is refused, although this process (root) could open it."""
        if os.geteuid():
            pytest.skip("only root can give a file away")
        with shm_file(mode=0o666) as path:
            os.chown(path, 65534, 65534)
            assert "refused" in refusal(table, path.name)
            others = RegionTable(65534)
            os.truncate(path, 0)
            path.write_bytes(bytes(PAGE))
            others.register("theirs", path.name, 0, PAGE)
            others.close()

    def test_holes_of_another_account(self):
        """Whoever touches a hole pays for its page: another account's memory has all its pages, or is refused."""
        if os.geteuid():
            pytest.skip("only root can give a file away")
        with shm_file(mode=0o666) as path:
            os.chown(path, 65534, 65534)
            others = RegionTable(65534)
            assert "refused" in refusal(others, path.name)

    def test_more_than_may_be(self, table):
        """So many regions and so many bytes, and room again after unregistering."""
        with shm_file(8 * PAGE) as path:
            for n in range(3):
                table.register(f"n{n}", path.name, 0, 8)
            with pytest.raises(Refusal, match="refused"):
                table.register("n3", path.name, 0, 8)
            table.unregister("n1")
            table.register("large", path.name, 0, 3 * PAGE)
            table.unregister("n2")
            with pytest.raises(Refusal, match="refused"):
                table.register("n4", path.name, 0, 2 * PAGE)
            table.unregister("")
            table.register("all", path.name, 0, 4 * PAGE)

    def test_a_name_twice(self, table):
        """A region keeps its name until it is unregistered."""
        with shm_file() as path:
            table.register("name", path.name, 0, 8)
            with pytest.raises(Refusal, match="registered already"):
                table.register("name", path.name, 0, 8)

    def test_not_inside_of_its_region(self, table):
        """An offset or a size beyond the region is refused; so is a region that is not there."""
        with shm_file() as path:
            table.register("here", path.name, 8, 64)
            for offset, nbytes in ((0, 65), (64, 1), (2**62, 2**62), (1, 64)):
                with pytest.raises(Refusal, match="are not in shared memory region 'here'"):
                    table.take([RegionSlice("here", offset, nbytes)])
            with pytest.raises(Refusal, match="no shared memory region 'there'"):
                table.take([RegionSlice("there", 0, 1)])


class TestEnd:
    def test_unused_ones_end(self):
        """What nothing has used for a while is ended: a client that died does not unregister."""
        table = RegionTable(os.getuid(), RegionLimits(idle=0.0))
        with shm_file() as path:
            table.register("left", path.name, 0, PAGE)
            assert table.status("") == []
            table.register("left", path.name, 0, PAGE)

    def test_used_ones_stay(self):
        """A region on which a request runs ends after that, and counts until then."""
        table = RegionTable(os.getuid(), RegionLimits(most=1, idle=0.0))
        with shm_file() as path:
            table.register("busy", path.name, 0, PAGE)
            with table.take([RegionSlice("busy", 0, 8)]) as use:
                table.expire()
                table.unregister("busy")
                assert not use["busy"].memory.is_closed
                with pytest.raises(Refusal, match="refused"):
                    table.register("next", path.name, 0, PAGE)
                region = use["busy"]
            assert region.memory.is_closed
            table.register("next", path.name, 0, PAGE)
            table.close()

    def test_after_a_refusal(self, client, kit):
        """A refused request keeps its region mapped no longer than others do: no garbage has to be collected."""
        gc.disable()
        try:
            with client_memory(NBYTES) as (_, key):
                client.register_system_shared_memory("refused", key, NBYTES)
                with pytest.raises(InferenceServerException, match="are not in shared memory region 'refused'"):
                    client.sum(rows(), rows(), outputs=[client.output("sum", "refused", NBYTES, 1)])
                client.unregister_system_shared_memory("refused")
            kit.until(lambda: not are_mapped([key]))  # a thread may end its call now
        finally:
            gc.enable()

    def test_by_many_threads(self, server, kit):
        """Registering, using and unregistering by many threads at once leaves nothing mapped or counted."""
        client = server.clients["unix"]

        def work(number):
            x = rows(begin=number)
            with client_memory(3 * NBYTES) as (handle, key):
                shared_memory.set_shared_memory_region(handle, [x, x])
                for n in range(10):
                    name = f"thread{number}-{n}"
                    client.register_system_shared_memory(name, key, 3 * NBYTES)
                    given = [client.placed(w, x, "FP32", name, NBYTES, i * NBYTES) for i, w in enumerate("xy")]
                    client.infer("sum", given, outputs=[client.output("sum", name, NBYTES, 2 * NBYTES)])
                    found = shared_memory.get_contents_as_numpy(handle, np.float32, (2, 4), offset=2 * NBYTES)
                    np.testing.assert_array_equal(found, 2 * x)
                    client.unregister_system_shared_memory(name)
            return key

        with ThreadPoolExecutor(6) as threads:
            keys = list(threads.map(work, range(6), timeout=PATIENCE))
        kit.until(lambda: not are_mapped(keys))  # a thread may end its call now


class TestLater:
    def test_it_is_cut_off(self, server, client):
        """A region that its client truncates reads as zeros or is an error, and the server and its device live on."""
        x = rows(2, begin=1)
        with client_memory(PAGE * 2) as (handle, key):
            shared_memory.set_shared_memory_region(handle, [x, x])
            client.register_system_shared_memory("cut", key, 2 * PAGE)
            try:
                given = [client.placed(w, x, "FP32", "cut", NBYTES, n * NBYTES) for n, w in enumerate("xy")]
                answer = client.output("sum", "cut", NBYTES, PAGE)
                client.infer("sum", given, outputs=[answer])
                os.truncate(f"/dev/shm{key}", 0)
                for _ in range(3):
                    with suppress(InferenceServerException):
                        client.infer("sum", given, outputs=[answer])
                os.truncate(f"/dev/shm{key}", 2 * PAGE)
            finally:
                client.unregister_system_shared_memory("cut")
        np.testing.assert_array_equal(client.sum(x, x).as_numpy("sum"), 2 * x)

    def test_it_is_unlinked(self, client):
        """A region whose file has no name any more goes on."""
        x = rows(2)
        with shm_file(PAGE) as path:
            with open(path, "r+b") as file:
                file.write(x.tobytes() * 2)
            client.register_system_shared_memory("unlinked", f"/{path.name}", PAGE)
            path.unlink()
            try:
                given = [client.placed(w, x, "FP32", "unlinked", NBYTES, n * NBYTES) for n, w in enumerate("xy")]
                np.testing.assert_array_equal(client.infer("sum", given).as_numpy("sum"), 2 * x)
            finally:
                client.unregister_system_shared_memory("unlinked")

    def test_its_client_dies(self, server):
        """kill -9 of a client between registering and unregistering: its region is there, and can be ended."""
        code = (
            "import sys, os, signal, tritonclient.grpc as t; c = t.InferenceServerClient(sys.argv[1]);"
            "c.register_system_shared_memory('orphan', sys.argv[2], 64); os.kill(os.getpid(), signal.SIGKILL)"
        )
        with client_memory(64) as (_, key):
            done = subprocess.run([sys.executable, "-c", code, server.its.addresses[2], key], check=False, timeout=60)
            assert done.returncode == -9
            client = server.clients["unix"]
            assert "orphan" in client.get_system_shared_memory_status().regions
            client.unregister_system_shared_memory("orphan")


class TestDoors:
    def test_tables_are_apart(self, server):
        """What is registered at the Unix socket is not known at TCP addresses."""
        with client_memory(64) as (_, key):
            server.clients["unix"].register_system_shared_memory("mine", key, 64)
            try:
                with pytest.raises(InferenceServerException, match="no shared memory region 'mine'"):
                    server.clients["grpc"].get_system_shared_memory_status("mine")
            finally:
                server.clients["unix"].unregister_system_shared_memory("mine")

    def test_other_accounts_cannot_open_the_socket(self, server):
        """The socket has mode 0700: not even another account that may enter its folder connects."""
        path = server.its.addresses[2].removeprefix("unix:")
        assert os.stat(path).st_mode & 0o777 == 0o700
        if why := accounts.missing():
            pytest.skip(why)
        os.chmod(os.path.dirname(path), 0o711)
        code = (
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\n"
            "try:\n    s.connect(sys.argv[1])\nexcept PermissionError:\n    sys.exit(7)"
        )
        done = subprocess.run(accounts.python_as(65534, (), code, path), cwd="/", check=False, timeout=60)
        assert done.returncode == 7
