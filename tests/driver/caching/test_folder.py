"""The cache folder as one process sees it: names, modes, hits, eviction, damage, and disks that refuse."""

import contextlib
import errno
import itertools
import json
import os
import re
import stat
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marked_sets import COUNTS, NAMES, TOKEN, WHOLE, fill, lying, mark_of, replace, wait_never
from waiting import nested

from driver.runtime.cache import entry as entries
from driver.runtime.cache import manifest as manifests
from driver.runtime.cache.folder import About, Counts, Folder, default_folder

OTHER = bytes(range(1, 33))


def token(n):
    return bytes([n]) * 32


def tokens(folder):
    return sorted(bytes.fromhex(entry.token)[0] for entry in folder.entries())


# ---- one entry -----------------------------------------------------------------------------------------------------


def test_what_was_committed_is_found(folder):
    """By every object for the same token, and by no other token."""
    assert mark_of(folder.entry(TOKEN)) is None
    assert replace(folder.entry(TOKEN), "first")
    assert mark_of(folder.entry(TOKEN)) == "first"
    assert mark_of(folder.entry(OTHER)) is None


def test_a_new_set_takes_the_place_of_the_old_one(folder):
    """And nothing is left of that, but for descriptors that are open."""
    entry = folder.entry(TOKEN)
    replace(entry, "first")
    with entry.opened(COUNTS) as files:
        replace(entry, "second")
        assert mark_of(entry) == "second"
        assert os.pread(files.data[1], 100, 0).startswith(b"first data 1")
    assert lying(folder) == WHOLE


@pytest.mark.parametrize("ending", ["nothing", "an error"])
def test_what_was_not_committed_is_gone(folder, ending):
    """And the old set stays."""
    entry = folder.entry(TOKEN)
    replace(entry, "first")
    with (
        contextlib.suppress(ZeroDivisionError),
        entry.locked(wait_never, None),
        entry.draft(COUNTS, About("", "", "")) as draft,
    ):
        fill(draft, "second")
        if ending == "an error":
            raise ZeroDivisionError
    assert mark_of(entry) == "first"
    assert lying(folder) == WHOLE


def test_descriptors_are_for_reading_and_writing_and_are_closed(folder):
    """Of drafts and of what was opened; programs that we start do not get them."""
    entry, seen = folder.entry(TOKEN), []
    with entry.locked(wait_never, None), entry.draft(COUNTS, About("", "", "")) as draft:
        seen += [*draft.files.model, *draft.files.data]
        assert [os.fstat(fd).st_size for fd in seen] == [0] * 4
        draft.commit()
        with entry.opened(COUNTS) as files:
            seen += [*files.model, *files.data]
            assert {os.get_inheritable(fd) for fd in seen} == {False}
            assert [os.write(fd, b"x") + len(os.pread(fd, 1, 0)) for fd in seen] == [2] * 8
    for fd in seen:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("counts", [Counts(2, 1), Counts(1, 2), Counts(3, 2), Counts(0, 0)])
def test_other_counts_are_no_entry(folder, counts):
    """A device that wants other files gets none."""
    replace(folder.entry(TOKEN), "first")
    with folder.entry(TOKEN).opened(counts) as files:
        assert files is None


def test_names_are_those_of_androids_runtime(folder):
    """Low half, high half, as letters from A on; then the kind and the index."""
    replace(folder.entry(bytes([0x01, 0xF0, 0xAB] + [0] * 29)), "first")
    names = sorted(path.name for path in folder.path.iterdir())
    assert {name[:64] for name in names} == {"BAAPLK" + "A" * 58}
    generation = names[-1].rpartition(".")[2]
    assert re.fullmatch("[0-9a-f]{16}", generation)
    ends = [".hits", ".json", ".lock", *(f"{n}.{generation}" for n in ("10", "11", "20", "21"))]
    assert [name[64:] for name in names] == ends


def test_files_are_the_users_alone(folder):
    """Whatever the umask is: it may take rights away, and there are none to give."""
    old = os.umask(0)
    try:
        made = Folder(folder.path / "inner")
        replace(made.entry(TOKEN), "first")
    finally:
        os.umask(old)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in made.path.iterdir()} == {0o600}


@pytest.mark.parametrize("wrong", [b"", bytes(31), bytes(33)])
def test_a_token_has_32_bytes(folder, wrong):
    """And nothing else."""
    with pytest.raises(ValueError, match=r"token=.*32"):
        folder.entry(wrong)


@pytest.mark.parametrize("wrong", [-1, 33, True, 1.0])
def test_counts_are_those_of_the_hal(wrong):
    """A device cannot ask for a thousand files."""
    with pytest.raises(ValueError, match=r"data=.*from 0 to 32"):
        Counts(1, wrong)


def test_a_draft_needs_the_lock(folder):
    """Without it two could take away each other's files."""
    entry = folder.entry(TOKEN)
    with entry.locked(wait_never, None):
        pass
    with pytest.raises(RuntimeError, match="locked"), entry.draft(COUNTS, About("", "", "")):
        pass


# ---- what is known of entries --------------------------------------------------------------------------------------


def test_entries_tell_what_they_are(folder):
    """Model, device, version, bytes, and the times; a device's words are one line of text, and not too long."""
    before = time.time()
    entry = folder.entry(TOKEN)
    with (
        entry.locked(wait_never, None),
        entry.draft(Counts(1, 0), About("a\x1b[2J\nb\ud800", "d", "v" * 10**6, 17)) as draft,
    ):
        os.write(draft.files.model[0], bytes(1000))
        draft.commit()
    (found,) = folder.entries()
    assert (found.token, found.model, found.device) == (TOKEN.hex(), "a\u241b[2J\u240ab\ufffd", "d")
    assert (set(found.version), len(found.version)) == ({"v"}, 300)
    assert (found.nbytes, found.made, found.hits) == (1000, 17.0, 0)
    nested(before, found.used, time.time())


def test_hits_are_counted_and_survive_a_new_set(folder):
    """And each is a use."""
    entry = folder.entry(TOKEN)
    replace(entry, "first")
    for _ in range(30):
        before = entry.listed().used
        entry.note_hit()
        assert entry.listed().used > before
    replace(entry, "second")
    assert entry.listed().hits == 30


def test_a_hit_of_nothing_is_nothing(folder):
    """Neither an error nor a file, with an entry that is gone or a folder that is."""
    folder.entry(TOKEN).note_hit()
    assert lying(folder) == []
    folder.path.rmdir()
    folder.entry(TOKEN).note_hit()
    assert folder.entries() == []


# ---- room ----------------------------------------------------------------------------------------------------------


def test_those_used_longest_ago_go_first(tmp_path):
    """When a commit makes the sum larger than the folder may be, and not before."""
    folder = Folder(tmp_path, 4000)
    for n in range(4):
        replace(folder.entry(token(n)), n, 1000)
    folder.entry(token(0)).note_hit()
    assert tokens(folder) == [0, 1, 2, 3]
    replace(folder.entry(token(4)), 4, 2000)
    assert tokens(folder) == [0, 3, 4]
    replace(folder.entry(token(5)), 5, 4000)
    assert tokens(folder) == [5]
    assert lying(folder) == WHOLE


def test_the_order_is_that_of_the_commits(folder):
    """However fast one follows the other."""
    used = []
    for n in range(30):
        replace(folder.entry(token(n)), n)
        used.append(folder.entry(token(n)).listed().used)
    assert used == sorted(set(used))


def test_an_entry_is_removed_from_its_manifest_to_its_lock(folder, monkeypatch):
    """Half of it is none, and who comes meanwhile waits: the manifest that goes is never a newer one."""
    replace(folder.entry(TOKEN), "first")
    gone, unlink = [], os.unlink
    monkeypatch.setattr(os, "unlink", lambda path: (gone.append(path[-5:]), unlink(path)))
    assert folder.remove(TOKEN)
    assert (gone[0], gone[-1], len(gone)) == (".json", ".lock", len(WHOLE))


def test_a_set_of_more_than_the_folder_holds_is_not_kept(tmp_path):
    """And takes nobody's place."""
    folder = Folder(tmp_path, 4000)
    replace(folder.entry(TOKEN), "first", 3000)
    assert not replace(folder.entry(TOKEN), "second", 4004)
    assert not replace(folder.entry(OTHER), "third", 4004)
    assert mark_of(folder.entry(TOKEN)) == "first"
    assert [entry.nbytes for entry in folder.entries()] == [3000]


def test_who_is_locked_is_neither_evicted_nor_removed(tmp_path):
    """It is being made anew; the next in order goes."""
    folder = Folder(tmp_path, 3000)
    for n in range(3):
        replace(folder.entry(token(n)), n, 1000)
    with folder.entry(token(0)).locked(wait_never, None):
        replace(folder.entry(token(3)), 3, 1000)
        assert tokens(folder) == [0, 2, 3]
        assert not folder.remove(token(0))
        removed, in_use = folder.prune(0)
        assert ([entry.nbytes for entry in removed], in_use, tokens(folder)) == ([1000, 1000], 1, [0])
        assert folder.clear() == ([], 1)
    assert mark_of(folder.entry(token(0))) == "0"
    assert folder.remove(token(0))
    assert folder.remove(token(0))
    assert lying(folder) == []


def test_prune_goes_by_size_and_by_age(folder):
    """Age is the time since the last use; without a size the folder's own holds."""
    for n in range(4):
        replace(folder.entry(token(n)), n, 1000)
        used = time.time() - 100 * (4 - n)
        for suffix in ("hits", "json"):
            os.utime(next(folder.path.glob(f"{manifests.stem_of(token(n))}.{suffix}")), (used, used))
    assert folder.prune() == ([], 0)
    assert folder.prune(4000, 1000) == ([], 0)
    assert [entry.token for entry in folder.prune(older_than=350).removed] == [token(0).hex()]
    folder.entry(token(1)).note_hit()
    assert [entry.token for entry in folder.prune(2000).removed] == [token(2).hex()]
    assert tokens(folder) == [1, 3]


def test_leftovers_go_and_what_is_not_ours_stays(folder):
    """With the next draft of their entry, and with prune; clear does not touch others' files either."""
    strange = {"notes.txt", manifests.stem_of(TOKEN) + ".txt", "A" * 63 + "10." + "0" * 16}
    left = {manifests.stem_of(TOKEN) + end + "0123456789abcdef" for end in ("10.", "231.", ".json.")}

    def names():
        return {path.name for path in folder.path.iterdir()}

    for name in strange | left:
        (folder.path / name).touch()
    entry = folder.entry(TOKEN)
    with entry.locked(wait_never, None), entry.draft(COUNTS, About("", "", "")) as draft:
        assert len(names()) == len(strange) + len([".lock", *NAMES])
        fill(draft, "first")
        draft.commit()
    assert len(names()) == len(strange) + len(WHOLE)
    for name in left | {manifests.stem_of(OTHER) + end for end in (".lock", ".hits", "10.0123456789abcdef")}:
        (folder.path / name).touch()
    assert folder.prune() == ([], 0)
    assert len(names()) == len(strange) + len(WHOLE)
    assert mark_of(folder.entry(TOKEN)) == "first"
    assert len(folder.clear().removed) == 1
    assert names() == strange


def test_no_fifo_stops_prune(folder):
    """A FIFO in the place of a lock is removed, and waited at by nobody, with a reader and without."""
    for token, has_reader in ((TOKEN, False), (OTHER, True)):
        path = folder.path / (manifests.stem_of(token) + ".lock")
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if has_reader else -1
        assert folder.prune() == ([], 0)
        assert not path.exists()
        if has_reader:
            os.close(reader)


# ---- the folder ----------------------------------------------------------------------------------------------------


def test_a_folder_that_others_can_reach_into_is_refused(tmp_path, monkeypatch):
    """By its path, and with what to do."""
    tmp_path.chmod(0o770)
    with pytest.raises(ValueError, match=f"{tmp_path} may be written to by others; `chmod"):
        Folder(tmp_path)
    tmp_path.chmod(0o755)
    Folder(tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: 4242)
    with pytest.raises(ValueError, match=f"{tmp_path} belongs to another user .*choose"):
        Folder(tmp_path)


def test_a_folder_is_a_folder(tmp_path):
    """And no file."""
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is not a folder; remove it or"):
        Folder(tmp_path / "file")


@pytest.mark.parametrize("kind", ["gone", "never made", "a link to nowhere", "opened to others"])
def test_a_folder_that_is_not_there_is_told_of_by_locked_alone(tmp_path, kind):
    """Whoever looks for an entry compiles without the cache."""
    path = tmp_path / "compiled"
    if kind == "never made":
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "compiled"
    elif kind == "a link to nowhere":
        path.symlink_to(tmp_path / "nowhere")
    folder = Folder(path)
    if kind == "gone":
        path.rmdir()
    elif kind == "opened to others":
        path.chmod(0o777)
    entry = folder.entry(TOKEN)
    entry.note_hit()
    assert (mark_of(entry), folder.entries()) == (None, [])
    with pytest.raises(OSError, match="compiled"), entry.locked(wait_never, None):
        pass


def test_how_much_it_holds_is_configured(tmp_path, monkeypatch):
    """In a file of the user's; an argument comes first, and 2 GiB last."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Folder(tmp_path / "a").most == 2 << 30
    config = tmp_path / ".config/burst/cache.toml"
    config.parent.mkdir(parents=True)
    config.write_text("most_mb = 3")
    assert Folder(tmp_path / "a").most == 3_000_000
    assert Folder(tmp_path / "a", 17).most == 17
    for wrong in ("most_mb = -1", "most_mb = '3'", "most_mb = true", "most = 3", "most_mb ="):
        config.write_text(wrong)
        with pytest.raises(ValueError, match=re.escape(str(config))):
            Folder(tmp_path / "a")
    with pytest.raises(ValueError, match="most=-1"):
        Folder(tmp_path / "a", -1)


def test_where_it_lies(monkeypatch):
    """Where the desktop's rules say; a relative path is none to them."""
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert str(default_folder()) == "/x/burst/compiled"
    for value in ("", "x"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert str(default_folder()) == "/h/.cache/burst/compiled"


# ---- waiting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_wait_ends_in_time(folder, timeout):
    """After saying once that it waits."""
    said = []
    with (
        folder.entry(TOKEN).locked(wait_never, None),
        pytest.raises(TimeoutError, match=f"timeout={timeout}"),
        folder.entry(TOKEN).locked(lambda: said.append(1), timeout),
    ):
        pass
    assert said == [1]
    with folder.entry(TOKEN).locked(wait_never, 0):
        pass


def test_a_wait_looks_twenty_times_a_second_at_most(folder, monkeypatch):
    """Time is a fake here: the lock is given up when it has been asked for a minute's worth."""
    naps, holder = [], contextlib.ExitStack()

    def nap(seconds):
        naps.append(seconds)
        if sum(naps) >= 60:
            holder.close()

    monkeypatch.setattr(entries, "time", SimpleNamespace(sleep=nap, monotonic=time.monotonic))
    holder.enter_context(folder.entry(TOKEN).locked(wait_never, None))
    with folder.entry(TOKEN).locked(lambda: None, None):
        assert len(naps) <= 60 * 20 + 1


def test_a_lock_that_was_removed_with_its_entry_is_none(folder, monkeypatch):
    """Who had opened its file before locks the new one: otherwise two could be in."""
    real, path = entries.fcntl.flock, folder.path / (manifests.stem_of(TOKEN) + ".lock")
    seen = []

    def flock(file, operation):
        real(file, operation)
        if not seen:
            path.unlink()
        seen.append(os.fstat(file.fileno()).st_ino)

    monkeypatch.setattr(entries.fcntl, "flock", flock)
    with folder.entry(TOKEN).locked(wait_never, 0):
        assert len(seen) == 2
        assert path.stat().st_ino == seen[1]


# ---- damage --------------------------------------------------------------------------------------------------------

GOOD = {
    "generation": "0123456789abcdef",
    "model_files": 2,
    "data_files": 2,
    "model": "m",
    "device": "d",
    "version": "v",
    "made": 1.5,
}
WRONG = {
    "generation": [
        "../../../../etc/x",
        "0123456789abcdeF",
        "0123456789abcdef\n",
        "",
        "fedcba9876543210",
        5,
        None,
        ["0"],
    ],
    "model_files": [-1, 33, 10**30, 2.0, "2", True, None, [2]],
    "data_files": [-1, 33, 1, 3],
    "model": [5, None, ["m"], {}],
    "device": [5, None],
    "version": [True, {}],
    "made": ["now", None, True, -1, float("nan"), float("inf"), 10**400, 1e12, [1]],
}


@pytest.fixture
def damaged(folder):
    """Files of a generation, and a function that looks at them through any manifest."""
    stem = folder.path / manifests.stem_of(TOKEN)
    for kind, index in NAMES:
        stem.with_name(f"{stem.name}{1 if kind == 'model' else 2}{index}.0123456789abcdef").write_text(
            f"whole {kind} {index}"
        )

    def look(raw):
        stem.with_name(stem.name + ".json").write_bytes(raw)
        found = mark_of(folder.entry(TOKEN))
        if found is None:
            with folder.entry(TOKEN).opened(COUNTS) as files:
                assert files is None
        listed = folder.entries()
        assert len(listed) == 1 or found is None
        return found

    return look


def test_a_good_manifest_is_the_entry(damaged):
    """So that those below are refused for what is wrong with them."""
    assert damaged(json.dumps(GOOD).encode()) == "whole"
    assert damaged(json.dumps({**GOOD, "made": 17, "more": "is no harm"}).encode()) == "whole"


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_value_is_no_entry(damaged, key, value):
    """Nor an error, nor a path outside the folder."""
    assert damaged(json.dumps({**GOOD, key: value}).encode()) is None


@pytest.mark.parametrize("key", GOOD)
def test_a_missing_value_is_no_entry(damaged, key):
    """Each is needed."""
    assert damaged(json.dumps({name: value for name, value in GOOD.items() if name != key}).encode()) is None


def test_a_truncated_manifest_is_no_entry(damaged):
    """Wherever it ends."""
    raw = json.dumps(GOOD).encode()
    assert {damaged(raw[:n]) for n in range(len(raw))} == {None}


@pytest.mark.parametrize(
    "raw",
    [b"[" * 60_000, b'{"a":' * 10_000, b"1" * 60_000, b" " * 70_000 + json.dumps(GOOD).encode(), b"\xff\xfe", b"[]"],
)
def test_garbage_is_no_entry(damaged, raw):
    """However deep or long."""
    assert damaged(raw) is None


@pytest.mark.integration
def test_fuzzed_manifests_are_whole_or_nothing(damaged):
    """Cut, overwritten and patched together at random; what is accepted names this generation's files."""
    raw = json.dumps(GOOD).encode()
    pieces = st.one_of(
        st.binary(max_size=8), st.sampled_from([b"..", b"/", b"\0", b"null", b"1e999", b"-1", b'"', b"{", b"\\ud800"])
    )
    edits = st.lists(st.tuples(st.integers(0, len(raw)), st.integers(0, 20), pieces), min_size=1, max_size=3)

    @settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @given(edits)
    def look(edits):
        found = raw
        for at, gone, piece in edits:
            found = found[:at] + piece + found[at + gone :]
        assert damaged(found) in {None, "whole"}

    look()


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "socket"])
@pytest.mark.parametrize("suffix", [".json", "10.0123456789abcdef", ".hits"])
def test_what_is_no_file_is_no_entry(damaged, folder, tmp_path, kind, suffix):
    """No link is followed out of the folder, and no pipe is waited for."""
    damaged(json.dumps(GOOD).encode())
    path = folder.path / (manifests.stem_of(TOKEN) + suffix)
    outside = tmp_path / "outside"
    outside.write_bytes(path.read_bytes() if path.exists() else b"")
    path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, stat.S_IFSOCK | 0o600)
    before = outside.read_bytes()
    folder.entry(TOKEN).note_hit()
    folder.entries()
    assert mark_of(folder.entry(TOKEN)) == ("whole" if suffix == ".hits" else None)
    assert outside.read_bytes() == before


def test_a_damaged_manifest_is_replaced(damaged, folder):
    """By the next draft, and is removed by prune."""
    damaged(b"{")
    replace(folder.entry(TOKEN), "new")
    assert (mark_of(folder.entry(TOKEN)), lying(folder)) == ("new", WHOLE)
    damaged(b"{")
    folder.prune()
    assert lying(folder) == []


# ---- disks that refuse ---------------------------------------------------------------------------------------------

CALLS = ("open", "unlink", "replace", "utime", "listdir", "fstat", "lstat", "stat")


@contextlib.contextmanager
def refusing(monkeypatch, step, number):
    """The call of this number, of those to the disk, fails. Yields what tells whether one did."""
    count = itertools.count(1)
    failed = []

    def refuse(function):
        def call(*args, **more):
            if sys._getframe(1).f_globals["__name__"].startswith("driver.runtime.cache") and next(count) == step:
                failed.append(function.__name__)
                raise OSError(number, os.strerror(number))
            return function(*args, **more)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, refuse(getattr(os, name)))
        yield failed


def open_below(folder):
    """The files of this process in that folder."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EMFILE, errno.EIO])
def test_a_disk_that_refuses_at_any_step_is_an_oserror(folder, monkeypatch, number):
    """Out of locked, draft and commit alone; the entry is the old or the new one, and nothing stays open."""
    entry, found = folder.entry(TOKEN), []
    for step in itertools.count(1):
        replace(entry, "old")
        with refusing(monkeypatch, step, number) as failed, contextlib.suppress(OSError):
            replace(entry, "new")
        assert open_below(folder.path) == []
        found.append(mark_of(entry))
        if not failed:
            break
    assert found == sorted(found, key=["old", "new"].index)
    assert found.count("old") > 15
    replace(entry, "last")
    assert lying(folder) == WHOLE


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_readers_meet_no_errors(folder, monkeypatch, number):
    """Whatever refuses: there is no entry then, and nothing stays open."""
    entry = folder.entry(TOKEN)
    replace(entry, "old")
    for step in itertools.count(1):
        with refusing(monkeypatch, step, number) as failed:
            entry.note_hit()
            folder.entries()
            assert mark_of(entry) in {None, "old"}
        assert open_below(folder.path) == []
        if not failed:
            break
    assert step > 15
    assert mark_of(entry) == "old"
