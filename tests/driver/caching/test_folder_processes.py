"""The cache folder with several processes and threads, any of which may be killed at any moment."""

import contextlib
import gc
import itertools
import os
import random
import select
import signal
import socket
import threading
import traceback
import warnings

import pytest
import waiting
from marked_sets import COUNTS, TOKEN, WHOLE, fill, lying, mark_of, replace, wait_never
from waiting import PATIENCE, until

from driver.runtime.cache.folder import About, Folder

CALLS = ("open", "write", "unlink", "replace", "utime", "listdir", "fstat", "lstat", "stat")


class Child:
    """A forked process that runs `function(child, ...)`. Numbers go both ways."""

    def __init__(self, function, *arguments):
        near, far = socket.socketpair()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork in a process with threads
            self.pid = os.fork()
        self._socket = near if self.pid else far
        (far if self.pid else near).close()
        if not self.pid:
            self._run(function, arguments)
        near.settimeout(PATIENCE)

    def _run(self, function, arguments):
        gc.disable()
        code = 1
        try:
            function(self, *arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)

    def tell(self, number=0):
        self._socket.sendall(number.to_bytes(4, "little"))

    def hear(self):
        """The next number; None when there will not be any."""
        raw = self._socket.recv(4, socket.MSG_WAITALL)
        return int.from_bytes(raw, "little") if len(raw) == 4 else None

    def kill(self, number=signal.SIGKILL):
        os.kill(self.pid, number)

    def ended(self):
        """Waits, and returns how it ended: 0, 1, or minus a signal's number."""
        pidfd = os.pidfd_open(self.pid)
        assert select.select([pidfd], [], [], PATIENCE)[0], "it does not end"
        os.close(pidfd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self):
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            self.kill()
            os.waitpid(self.pid, 0)
        self._socket.close()


@pytest.fixture
def fork():
    with contextlib.ExitStack() as stack:

        def fork(function, *arguments):
            child = Child(function, *arguments)
            stack.callback(child.close)
            return child

        yield fork


# ---- one at a time -------------------------------------------------------------------------------------------------


def compile_once(folder, done, on_wait=lambda: None):
    """As programs do: look, lock, look again, compile. `done` is called by whoever compiles."""
    entry = folder.entry(TOKEN)
    if mark_of(entry):
        return
    with entry.locked(on_wait, None):
        if not mark_of(entry):
            with entry.draft(COUNTS, About("", "", "")) as draft:
                done()
                fill(draft, "made")
                draft.commit()


def test_a_second_process_waits_for_the_first(folder, fork):
    """And finds what that has made; it has been told once that it waits."""

    def first(child):
        def done():
            child.tell()
            child.hear()

        compile_once(folder, done)

    child, waits = fork(first), []

    def on_wait():
        waits.append(1)
        child.tell()

    child.hear()
    compile_once(folder, pytest.fail, on_wait)
    assert mark_of(folder.entry(TOKEN)) == "made"
    assert waits == [1]
    assert child.ended() == 0


@pytest.mark.integration
def test_of_many_processes_one_compiles(folder, fork):
    """All of them have the result in the end."""

    def one(child):
        child.hear()
        compile_once(folder, lambda: child.tell(1))
        assert mark_of(folder.entry(TOKEN)) == "made"
        child.tell(2)

    children = [fork(one) for _ in range(8)]
    for child in children:
        child.tell()
    told = [list(iter(child.hear, None)) for child in children]
    assert [child.ended() for child in children] == [0] * 8
    assert sorted(told) == [[1, 2], *[[2]] * 7]


def test_of_many_threads_one_compiles(folder):
    """A lock is a thread's, not a process's."""
    done, start = [], threading.Barrier(8)

    def one():
        start.wait(PATIENCE)
        compile_once(folder, lambda: done.append(1))

    threads = [threading.Thread(target=one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert (done, mark_of(folder.entry(TOKEN))) == ([1], "made")


def holding(child, folder):
    with folder.entry(TOKEN).locked(wait_never, None):
        child.tell()
        child.hear()


def test_the_lock_of_a_killed_process_is_free(folder, fork):
    """Who waits for it goes on."""
    child = fork(holding, folder)
    child.hear()
    with folder.entry(TOKEN).locked(child.kill, PATIENCE):
        assert child.ended() == -signal.SIGKILL


def test_a_child_that_was_forked_under_the_lock_does_not_keep_it(folder, fork):
    """Its parent gives it up for both."""
    with folder.entry(TOKEN).locked(wait_never, None):
        child = fork(Child.hear)
    with folder.entry(TOKEN).locked(wait_never, 0):
        child.tell()
    assert child.ended() == 0


def test_ctrl_c_ends_a_wait(folder, fork):
    """At once, and the lock was never its own."""

    def waiting(child):
        with pytest.raises(KeyboardInterrupt), folder.entry(TOKEN).locked(child.tell, None):
            pass

    with folder.entry(TOKEN).locked(wait_never, None):
        child = fork(waiting)
        child.hear()
        child.kill(signal.SIGINT)
        assert child.ended() == 0


def test_removing_never_lets_two_in(folder, fork):
    """Three processes lock one entry over and over, and a fourth removes it, lock and all."""
    inside = folder.path.parent / "inside"

    def locking(child):
        stop = select.poll()
        stop.register(child._socket, select.POLLIN)
        rounds = 0
        while not (rounds and stop.poll(0)):
            with folder.entry(TOKEN).locked(lambda: None, PATIENCE):
                inside.touch(exist_ok=False)  # FileExistsError: somebody else is in
                inside.unlink()
            rounds += 1
        child.tell(rounds)

    def removing(child):
        removed = 0
        while removed < 10:
            removed += folder.remove(TOKEN)
        child.tell(removed)

    children = [fork(locking) for _ in range(3)]
    assert fork(removing).hear() == 10
    for child in children:
        child.tell()
    assert all(child.hear() > 0 for child in children)


# ---- whole sets ----------------------------------------------------------------------------------------------------


def writing(child, folder, mark):
    """Writes one set after the other, with marks that count on, and tells each when it is there."""
    for number in itertools.count(mark):
        replace(folder.entry(TOKEN), number, on_wait=lambda: None)
        child.tell(number)


def test_readers_never_see_a_mix(folder, fork):
    """Nor nothing, nor an older set than before, while another process writes as fast as it can."""
    child = fork(writing, folder, 1)
    child.hear()
    found = [0]

    def has_seen_many():
        found.append(int(mark_of(folder.entry(TOKEN))))
        return len(set(found)) >= 40

    until(has_seen_many)
    assert found == sorted(found)


def test_what_is_listed_while_others_write_is_whole(folder, fork):
    """Neither list nor prune disturbs or is disturbed: the entry is there every time, with all of its bytes."""
    child = fork(writing, folder, 10**6)
    child.hear()
    nbytes = sum(len(f"1000000 {kind} 0 ") for kind in ("model", "model", "data", "data"))
    for _ in range(100):
        assert [entry.nbytes for entry in folder.entries()] == [nbytes]
        assert folder.prune() == ([], 0)


@pytest.mark.integration
def test_a_full_folder_stays_whole(tmp_path, fork):
    """Four processes write sixteen entries each into a folder that holds five, and read what they find."""
    folder = Folder(tmp_path, 5000)

    def filling(child, seed):
        child.hear()
        for n in random.Random(seed).sample(range(16), 16):
            entry = folder.entry(bytes([n]) * 32)
            replace(entry, n, 1000, on_wait=lambda: None)
            entry.note_hit()
            assert mark_of(entry) in {None, str(n)}

    children = [fork(filling, seed) for seed in range(4)]
    for child in children:
        child.tell()
    assert [child.ended() for child in children] == [0] * 4
    replace(folder.entry(TOKEN), "last", 1000)
    found = folder.entries()
    assert sum(entry.nbytes for entry in found) <= 5000
    assert mark_of(folder.entry(TOKEN)) == "last"
    folder.prune()
    assert len(list(folder.path.iterdir())) == len(WHOLE) * len(found)


def die_at(step):
    """Kill this process before its call to the disk of that number."""
    count = itertools.count(1)

    def deadly(function):
        def call(*args, **more):
            if next(count) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **more)

        return call

    for name in CALLS:
        setattr(os, name, deadly(getattr(os, name)))


@pytest.mark.integration
def test_killed_at_any_step(folder, fork):
    """Of replacing an entry: the whole old set is there, then the whole new one; the next draft leaves nothing else."""

    def replacing(_, step):
        die_at(step)
        replace(folder.entry(TOKEN), "new")

    found = []
    for step in itertools.count(1):
        replace(folder.entry(TOKEN), "old")
        end = fork(replacing, step).ended()
        found.append(mark_of(folder.entry(TOKEN)))
        if not end:
            break
        assert end == -signal.SIGKILL
    assert found == sorted(found, key=["old", "new"].index)
    assert found.count("old") > 15
    assert found.count("new") > 5
    replace(folder.entry(TOKEN), "last")
    assert lying(folder) == WHOLE


def kill_writers(folder, fork, kills, seed=0):
    """One after the other, each some time within its first few sets. Returns how many left files that are nobody's."""
    rng, last, littered = random.Random(seed), 0, 0
    for _ in range(kills):
        child = fork(writing, folder, last + 1)
        last = child.hear()
        waiting.last(rng.uniform(0, 0.004))
        child.kill()
        assert child.ended() == -signal.SIGKILL
        last = max([last, *iter(child.hear, None)])
        found = int(mark_of(folder.entry(TOKEN)))
        assert found in {last, last + 1}
        last = found
        littered += lying(folder) != WHOLE
    folder.prune()
    assert lying(folder) == WHOLE
    return littered


@pytest.mark.integration
def test_killed_at_random_moments(folder, fork):
    """Sixty writers: what was told to be there is there, or what came after it, and always whole."""
    assert kill_writers(folder, fork, 60) > 5


@pytest.mark.stress
def test_killed_at_five_hundred_random_moments(folder, fork):
    """The same, eight times as often."""
    assert kill_writers(folder, fork, 500, 1) > 50


@pytest.mark.integration
def test_killed_while_removing(folder, fork):
    """At each step the entry is there as a whole, or not at all, and can be made again."""

    def removing(_, step):
        die_at(step)
        folder.remove(TOKEN)

    found = []
    for step in itertools.count(1):
        replace(folder.entry(TOKEN), "old")
        end = fork(removing, step).ended()
        found.append(mark_of(folder.entry(TOKEN)))
        if not end:
            break
    assert found == sorted(found, key=["old", None].index)
    assert found.count(None) > 5
    assert lying(folder) == []
