"""The file of a blob store: whatever it is, whatever the system refuses and whenever a process is killed."""

import contextlib
import logging
import os
import random
import resource
import signal
import sqlite3
import stat
import subprocess
import threading
from pathlib import Path

import pytest
import stress
import waiting

from driver.engine.cache import blobs
from driver.engine.cache.blobs import BlobStore

NEVER = float("inf")


def saved(path, entries, **options):
    """A closed file that has them."""
    store = BlobStore(path, **{"build_id": "one", "delay": NEVER, **options})
    for key, value in entries.items():
        store.set(key, value)
    store.close()


def found(store, *keys):
    return [store.get(key) for key in keys]


# ---- files that are not what they should be --------------------------------------------------------------------------


def sizes(path):
    return {entry.name: entry.stat().st_size for entry in path.parent.iterdir()}


def test_private(opened, path):
    """The folder is 0700, and every file in it 0600, whatever the umask and whoever had it open to others before."""
    mask = os.umask(0)
    try:
        saved(path, {b"k": b"v"})
        path.chmod(0o666)
        store = opened()
        store.set(b"l", b"v")
        store.flush()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(entry.stat().st_mode) for entry in path.parent.iterdir()} == {0o600}
    assert len(sizes(path)) == 3


def test_another_build(opened):
    """Another build finds nothing, and takes the file over when it saves; then the first one finds nothing."""
    saved_by_one = opened()
    saved_by_one.set(b"k", b"one")
    saved_by_one.flush()
    two = opened(build_id="two")
    assert two.get(b"k") is None
    assert opened().get(b"k") == b"one"
    two.set(b"l", b"two")
    two.flush()
    saved_by_one.close()
    assert found(opened(build_id="two"), b"k", b"l") == [None, b"two"]
    assert found(opened(), b"k", b"l") == [None, None]


@pytest.mark.parametrize("content", [b"x", b"nn$$" * 1000, b"SQLite format 3\0" * 100, b"\0" * 5000])
def test_foreign_file(opened, path, content):
    """A file of something else means an empty store, which replaces it."""
    path.parent.mkdir()
    path.write_bytes(content)
    store = opened()
    assert store.get(b"k") is None
    store.set(b"k", b"v")
    store.flush()
    assert opened().get(b"k") == b"v"


@pytest.mark.parametrize(
    "script",
    [
        "CREATE TABLE other(a)",
        "CREATE TABLE entry(key, used, sum, value)",
        "CREATE VIEW entry AS SELECT x'6b' AS key, 1 AS used, 1 AS sum, x'76' AS value",
    ],
)
def test_foreign_database(opened, path, script):
    """So does a database of something else, also one with a table of the same name."""
    path.parent.mkdir()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(script)
    store = opened()
    assert store.get(b"k") is None
    store.set(b"k", b"v")
    store.flush()
    assert opened().get(b"k") == b"v"


def test_too_large(opened, path):
    """A file that is too large to be ours is replaced unread, and so is one with more than twice the total in it."""
    saved(path, {b"k": b"v"})
    os.truncate(path, 2**23)
    assert opened(max_total_bytes=2**10).get(b"k") is None
    assert path.stat().st_size < 2**14
    saved(path.with_name("b"), {b"%d" % n: b"v" * 99 for n in range(30)})
    assert [opened(path.with_name("b"), max_total_bytes=10**3).get(b"%d" % n) for n in range(30)] == [None] * 30


def test_a_smaller_total(opened, path):
    """A store with a smaller total than the file's last one evicts at once; with smaller limits it does not look."""
    saved(path, {b"%d" % n: b"abc" for n in range(9)})
    store = opened(max_total_bytes=20, select="lru", capacity="fit")
    assert [n for n in range(9) if store.get(b"%d" % n)] == [4, 5, 6, 7, 8]
    assert found(opened(max_value_bytes=2), b"8") == [None]


def test_damaged_row(opened, path):
    """A row whose checksum does not match is absent, and the next save removes it; the others stay."""
    saved(path, {b"a": b"first", b"b": b"second"})
    content = path.read_bytes()
    path.write_bytes(content.replace(b"first", b"FIRST"))
    store = opened()
    assert found(store, b"a", b"b") == [None, b"second"]
    store.close()
    assert rows_in(path) == {b"b"}


def rows_in(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        return {key for (key,) in database.execute("SELECT key FROM entry WHERE key <> x''")}


def test_rows_do_not_change_places(opened, path):
    """A value that belongs to another key is not taken for this one's."""
    saved(path, {b"a": b"first", b"b": b"other"})
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE entry SET value = x'6f74686572' WHERE key = x'61'")
    assert found(opened(), b"a", b"b") == [None, b"other"]


def test_damaged_under_a_living_store(opened, path):
    """A store whose file is damaged or removed while it is open keeps its entries, and the next save writes them anew;
    another store that had the file open writes its own there, too.
    """
    for ruin in (lambda: path.write_bytes(b"x" * 9999), path.unlink):
        one, other = opened(), opened()
        one.set(b"one", b"v")
        one.flush()
        other.set(b"other", b"v")
        ruin()
        for store in (one, other, one):
            store.set(b"k", b"v")
            store.flush()
        assert found(opened(), b"one", b"other", b"k") == [b"v"] * 3
        one.close()
        other.close()
        assert found(opened(), b"one", b"other", b"k") == [b"v"] * 3


@pytest.mark.integration
def test_every_truncation(quick, monkeypatch):
    """A file that was cut off anywhere: no exception, the value that was set or none, and what is set then is kept."""
    pragmas = ("page_size=512", *blobs._PRAGMAS[1:])  # fewer places
    monkeypatch.setattr(blobs, "_PRAGMAS", pragmas)
    path = quick / "b"
    saved(path, {b"k": b"value" * 9})
    content = path.read_bytes()
    assert len(content) == 2 * 512
    for length in range(len(content)):
        assert after_damage(path, content[:length], {b"k": b"value" * 9}, length % 32 == 0) == 0


@pytest.mark.parametrize("flips", [400, pytest.param(stress.times(20_000), marks=pytest.mark.stress)])
def test_byte_flips(quick, flips):
    """The same for a file of many pages with a byte changed anywhere, and most of the time most entries are there."""
    seeded = random.Random(5)
    entries = {seeded.randbytes(32): seeded.randbytes(seeded.randrange(1, 3000)) for _ in range(4)}
    path, counts = quick / "b", []
    saved(path, entries)
    content = path.read_bytes()
    for n in range(flips):
        changed = bytearray(content)
        place = seeded.randrange(len(content)) if n % 4 else seeded.randrange(2048)
        changed[place] ^= seeded.randrange(1, 256)
        counts.append(after_damage(path, bytes(changed), entries, n % 32 == 0))
    assert {0, 3, 4} <= set(counts)
    assert sum(counts) > 2 * flips


def test_damaged_log(quick):
    """What a killed process left in the log, cut off or changed anywhere: each entry is there as it was set, or not."""
    seeded, path = random.Random(6), quick / "b"
    log, entries = quick / "b-wal", {b"%d" % n: b"value %d" % n * 20 for n in range(8)}
    store = BlobStore(path, build_id="one", delay=NEVER)
    for key, value in entries.items():
        store.set(key, value)
        store.flush()
    file, content = path.read_bytes(), log.read_bytes()
    store.close()
    counts = []
    for n in range(300):
        changed = bytearray(content[: seeded.randrange(len(content)) if n % 2 else None])
        if n % 2 == 0:
            changed[seeded.randrange(len(content))] ^= seeded.randrange(1, 256)
        (quick / "b-shm").unlink(missing_ok=True)
        path.write_bytes(file)
        log.write_bytes(changed)
        store = BlobStore(path, build_id="one", delay=NEVER)
        values = {key: store.get(key) for key in entries}
        store.close()
        assert all(value in (None, entries[key]) for key, value in values.items())
        counts.append(sum(value is not None for value in values.values()))
    assert set(counts) == set(range(8))


def test_many_make_it_anew_at_once(path):
    """Eight stores that find the same damaged file at once leave one in which all that they set is."""
    for _ in range(5):
        path.parent.mkdir(0o700, exist_ok=True)
        path.write_bytes(b"x" * 9999)
        start = threading.Barrier(8)

        def work(n, start=start):
            start.wait()
            saved(path, {b"%d %d" % (n, i): b"v" * 99 for i in range(20)})

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        store = BlobStore(path, build_id="one", delay=NEVER)
        assert [(n, i) for n in range(8) for i in range(20) if not store.get(b"%d %d" % (n, i))] == []
        store.close()


def after_damage(path, content, entries, writes):
    """How many of the entries a store finds in this file, as they were set."""
    for side in ("-wal", "-shm"):
        path.with_name(path.name + side).unlink(missing_ok=True)
    path.write_bytes(content)
    store = BlobStore(path, build_id="one", delay=NEVER)
    values = {key: store.get(key) for key in entries}
    there = [key for key in entries if values[key] is not None]
    assert all(values[key] == entries[key] for key in there)
    if writes:
        store.set(b"new", b"value")
    store.close()
    if writes:
        store = BlobStore(path, build_id="one", delay=NEVER)
        assert found(store, b"new", *there) == [b"value", *(entries[key] for key in there)]
        store.close()
    return len(there)


# ---- what the system refuses -----------------------------------------------------------------------------------------


@pytest.fixture
def warnings(caplog):
    """What was logged for users to see."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def works_in_memory(store):
    for n in range(3):
        store.set(b"%d" % n, b"v")
        store.flush()
        assert store.get(b"%d" % n) == b"v"


def test_no_folder(opened, warnings):
    """Where no folder can be made the store is in memory, and says so once."""
    store = opened(Path("/proc/self/blobs/b"))
    works_in_memory(store)
    store.close()
    (warning,) = warnings()
    assert "in memory only" in warning


READER = """
import logging, os, sys
from pathlib import Path
from driver.engine.cache.blobs import BlobStore
logging.basicConfig(format="%(levelname)s")
if not os.geteuid():
    os.setuid(int(sys.argv[2]))
store = BlobStore(Path(sys.argv[1]), build_id="one", delay=float("inf"))
for n in range(3):
    store.set(b"k", b"%d" % n)
    store.flush()
    assert store.get(b"k") == b"%d" % n
store.close()
"""


@pytest.mark.integration
def test_read_only_folder(quick, kit):
    """So it is in a folder that may not be written to (by a user for whom that is so, which root is not)."""
    user = os.geteuid() or 65534
    os.chown(quick, user, -1)
    quick.chmod(0o500)
    with kit.python(READER, quick / "b", user, stderr=subprocess.PIPE, text=True) as reader:
        _, complaints = reader.communicate(timeout=kit.patience)
    quick.chmod(0o700)
    assert (reader.returncode, complaints) == (0, "WARNING\n")
    assert not list(quick.iterdir())


def strange(kind, path):
    """Something at a path where a file is expected."""
    target = path.with_name("target")
    if kind == "link":
        saved(target, {b"k": b"v"})
        path.symlink_to(target)
    elif kind == "link of the log":
        target.write_bytes(b"precious")
        path.with_name(path.name + "-wal").symlink_to(target)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["link", "link of the log", "folder", "fifo"])
def test_no_file(opened, path, warnings, kind):
    """No link is followed, and neither a folder nor a FIFO is opened, waited for or removed."""
    path.parent.mkdir(0o700)
    strange(kind, path)
    before = {entry.name: entry.lstat() for entry in path.parent.iterdir()}
    store = opened()
    assert store.get(b"k") is None
    works_in_memory(store)
    store.close()
    assert before.items() <= {entry.name: entry.lstat() for entry in path.parent.iterdir()}.items()
    assert len(warnings()) == 1


def test_another_users_file(opened, path, warnings, monkeypatch):
    """A file of another user is neither read nor removed."""
    saved(path, {b"k": b"v"})
    real = os.lstat
    monkeypatch.setattr(blobs.os, "lstat", lambda at: os.stat_result([*real(at)[:4], 12345, *real(at)[5:]]))
    store = opened()
    assert store.get(b"k") is None
    works_in_memory(store)
    assert len(warnings()) == 1
    monkeypatch.undo()
    assert opened().get(b"k") == b"v"


def test_a_folder_of_everybody(opened, path, warnings):
    """Where others may write, they could replace the file: nothing is read or written there."""
    saved(path, {b"k": b"v"})
    path.parent.chmod(0o777)
    store = opened()
    assert store.get(b"k") is None
    works_in_memory(store)
    assert len(warnings()) == 1
    path.parent.chmod(0o700)
    store.flush()
    assert found(opened(), b"k", b"0") == [b"v", b"v"]


@contextlib.contextmanager
def no_room(nbytes):
    """No file can be written to beyond so many bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_room_at_first(opened, warnings):
    """Without room on the disk the store is in memory and says so once; with room, a flush saves everything."""
    with no_room(0):
        store = opened()
        works_in_memory(store)
        assert len(warnings()) == 1
    store.flush()
    assert found(opened(), b"0", b"1", b"2") == [b"v"] * 3


def test_no_room_later(opened, path, warnings):
    """A save that does not fit leaves the last one whole, and is made good later."""
    store = opened()
    store.set(b"first", b"v")
    store.flush()
    store.set(b"large", b"v" * 60_000)
    store.set(b"first", b"w")
    with no_room(sum(entry.stat().st_size for entry in path.parent.iterdir())):
        store.flush()
        assert found(store, b"first", b"large") == [b"w", b"v" * 60_000]
        store.flush()
        assert len(warnings()) == 1
    assert found(opened(), b"first", b"large") == [b"v", None]
    store.flush()
    assert found(opened(), b"first", b"large") == [b"w", b"v" * 60_000]


def test_locked_for_long(opened, path, warnings, monkeypatch):
    """A process that keeps the file locked makes nobody wait for ever, and loses nothing."""
    monkeypatch.setattr(blobs, "_PATIENCE", 0.02)
    store = opened()
    store.set(b"k", b"v")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("BEGIN EXCLUSIVE")
        store.flush()
        assert store.get(b"k") == b"v"
    assert len(warnings()) == 1
    store.flush()
    assert opened().get(b"k") == b"v"


# ---- killed processes ------------------------------------------------------------------------------------------------

WRITERS = r"""
import os, sys
from pathlib import Path
from driver.engine.cache.blobs import BlobStore

def write(start):
    limits = {"max_total_bytes": 10**6, "select": "lru", "capacity": "fit"}
    store = BlobStore(Path(sys.argv[1]), build_id="one", delay=float("inf"), **limits)
    for n in range(start, start + 10**6):
        for i in range(10):
            store.set(b"%d %d" % (i, n), b"%d " % n * (500 + n % 80))
        store.flush()
        os.write(1, b"%d\n" % n)

for line in sys.stdin:
    if not (pid := os.fork()):
        write(int(line))
    os.waitpid(pid, 0)
    os.write(1, b"end\n")
"""


@pytest.mark.integration
@pytest.mark.parametrize("kills", [5, pytest.param(stress.times(300), marks=pytest.mark.stress)])
def test_killed_while_writing(quick, kit, kills):
    """After each of so many kills at random moments, the last 10 saves, of 10 entries each, are there, whole."""
    seeded, path, start = random.Random(3), quick / "cache" / "b", 0
    with kit.python(WRITERS, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as writers:
        for _ in range(kills):
            writers.stdin.write(f"{start}\n")
            last = killed(writers, seeded)
            store = BlobStore(path, build_id="one", delay=NEVER, max_total_bytes=10**6)
            saves = range(max(0, last - 9), last + 1)
            found = {(i, n): store.get(b"%d %d" % (i, n)) for n in saves for i in range(10)}
            wrong = [key for key, value in found.items() if value != b"%d " % key[1] * (500 + key[1] % 80)]
            assert wrong == []
            store.close()
            start = last + 1
        writers.stdin.close()
        assert writers.wait(kit.patience) == 0


def killed(writers, seeded):
    """Kills the writer at some moment. The number of its last save."""
    last = -1
    for _ in range(seeded.randrange(1, 20)):
        last = int(writers.stdout.readline())
    waiting.last(seeded.uniform(0, 3e-3))
    (child,) = Path(f"/proc/{writers.pid}/task/{writers.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    while (line := writers.stdout.readline()) != "end\n":
        last = int(line)
    return last
