"""The blob store: nnCache's rules, when it saves, and several stores on one file."""

import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from driver.engine.cache.blobs import BlobStore

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

NEVER = float("inf")
SMALL = {"max_key_bytes": 6, "max_value_bytes": 8, "max_total_bytes": 13}
POLICIES = [(select, capacity) for select in ("random", "lru") for capacity in ("halve", "fit", "fit_halve")]


def found(store, *keys):
    return [store.get(key) for key in keys]


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"", b"v"), (b"k", b""), (b"k" * 7, b"v"), (b"k", b"v" * 9), (b"k" * 6, b"v" * 8)],
    ids=["no key", "no value", "long key", "long value", "more than the total"],
)
def test_what_is_ignored(opened, key, value):
    """A set of these is ignored, and what the store has stays; one byte less would have been kept."""
    store = opened(**SMALL)
    store.set(b"a", b"b")
    store.set(key, value)
    assert found(store, b"a", key) == [b"b", None]


def test_refused_replacement(opened):
    """A value that is too large leaves the key its old one, and a bytearray is copied."""
    store, value = opened(**SMALL), bytearray(b"old")
    store.set(b"k", value)
    value[:] = b"new"
    store.set(b"k", b"v" * 9)
    store.set(b"k", b"")
    assert store.get(b"k") == b"old"


@pytest.mark.parametrize(("select", "capacity"), POLICIES)
def test_exactly_full(opened, select, capacity):
    """Entries whose sizes add up to the total are all kept, whatever the policy."""
    store = opened(**SMALL, select=select, capacity=capacity)
    store.set(b"abc", b"def")
    store.set(b"gh", b"ijklm")
    assert found(store, b"abc", b"gh") == [b"def", b"ijklm"]


@pytest.mark.parametrize(
    ("capacity", "nbytes", "left"),
    [
        *(("halve", 4, "ab6"), ("fit", 4, "deab6"), ("fit_halve", 4, "ab6")),
        *(("halve", 13, "ab"), ("fit", 13, "b6"), ("fit_halve", 13, "b6")),
    ],
)
def test_eviction(opened, capacity, nbytes, left):
    """Five entries of 4 bytes fill 20, used in the order c d e a b: what is left when "6" of `nbytes` is set."""
    store = opened(max_total_bytes=20, select="lru", capacity=capacity)
    for key in (b"b", b"c", b"d", b"e", b"a"):
        store.set(key, b"abc")
    store.set(b"a", b"xyz")
    store.get(b"b")
    store.set(b"6", b"v" * (nbytes - 1))
    assert [key for key in "cdeab6" if store.get(key.encode())] == list(left)


@pytest.mark.parametrize(("capacity", "left"), [("halve", "c"), ("fit", "bc"), ("fit_halve", "c")])
def test_replacement_counts_growth(opened, capacity, left):
    """A value that grows by 1 in a full store evicts one entry, or half of them."""
    store = opened(max_total_bytes=12, select="lru", capacity=capacity)
    for key in (b"a", b"b", b"c"):
        store.set(key, b"123")
    store.set(b"c", b"1234")
    assert [key for key in "abc" if store.get(key.encode())] == list(left)


def test_halve_drops_what_does_not_fit(opened):
    """With "halve", what is larger than the other half evicts nothing if less than half is taken."""
    store = opened(max_total_bytes=20, select="lru", capacity="halve")
    store.set(b"a", b"v" * 9)
    store.set(b"b", b"v" * 10)
    assert found(store, b"a", b"b") == [b"v" * 9, None]


@pytest.mark.parametrize("capacity", ["halve", "fit", "fit_halve"])
def test_random_victims(opened, path, capacity):
    """Victims drawn at random are not always the same ones, and there are as many as the policy says."""
    survivors = set()
    for n in range(8):
        store = opened(path.with_name(str(n)), max_total_bytes=40, select="random", capacity=capacity)
        for key in b"abcdefghij":
            store.set(bytes([key]), b"123")
        store.set(b"k", b"123")
        kept = [key for key in b"abcdefghij" if store.get(bytes([key]))]
        assert len(kept) == {"halve": 5, "fit": 9, "fit_halve": 5}[capacity]
        assert store.get(b"k") == b"123"
        survivors.add(tuple(kept))
    assert len(survivors) > 1


class Model:
    """The rules for "lru" in another way: a list of [key, value], the one used last at the end."""

    def __init__(self, most_key, most_value, most, capacity):
        self.most_key, self.most_value, self.most, self.halves = most_key, most_value, most, capacity == "halve"
        self.items = []

    def size(self):
        return sum(len(key) + len(value) for key, value in self.items)

    def get(self, key):
        for item in self.items:
            if item[0] == key:
                self.items.remove(item)
                self.items.append(item)
                return item[1]
        return None

    def set(self, key, value):
        fits = len(key) <= self.most_key and len(value) <= self.most_value and len(key) + len(value) <= self.most
        if not (key and value and fits):
            return
        while True:
            others = [item for item in self.items if item[0] != key]
            after = sum(len(k) + len(v) for k, v in others) + len(key) + len(value)
            if after <= self.most:
                self.items = [*others, [key, value]]
                return
            limit = self.most // 2 if self.halves else self.size() - (after - self.most)
            if self.size() <= limit:
                return
            while self.size() > limit:
                self.items.pop(0)


KEYS = st.binary(max_size=5)
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=12)),
    st.tuples(st.just("get"), KEYS),
    st.tuples(st.sampled_from(["flush", "reopen", "sibling"])),
)


@pytest.mark.parametrize("capacity", ["fit", "halve"])
def test_against_a_model(quick, capacity):
    """Any sets, gets, saves and reopenings leave what the model has, in the order in which it would go; a second store
    on the file has what was saved.
    """

    @settings(max_examples=50, deadline=None, database=None)
    @given(st.lists(STEPS, max_size=25), st.integers(8, 30))
    def holds(steps, most):
        options = {"max_key_bytes": 4, "max_value_bytes": 10, "max_total_bytes": most, "select": "lru"}
        options |= {"capacity": capacity, "build_id": "one", "delay": NEVER}
        with tempfile.TemporaryDirectory(dir=quick) as folder:
            file, model = Path(folder) / "b", Model(4, 10, most, capacity)
            store = BlobStore(file, **options)
            for name, *arguments in steps:
                if name in ("set", "get"):
                    assert getattr(store, name)(*arguments) == getattr(model, name)(*arguments)
                elif name == "flush":
                    store.flush()
                elif name == "reopen":
                    store.close()
                    store = BlobStore(file, **options)
                else:
                    store.flush()
                    other = BlobStore(file, **options)
                    assert {key: other._entries[key] for key in other._entries} == dict(model.items)
                    other.close()
                assert [list(item) for item in store._entries.items()] == model.items
                assert store._total == model.size() <= most
            store.close()

    holds()


# ---- when it is saved ------------------------------------------------------------------------------------------------


def test_unsaved_until_flush(opened):
    """A set is seen at once by whoever made it, and by others after a flush."""
    one, other = opened(), opened()
    one.set(b"k", b"v")
    assert (one.get(b"k"), other.get(b"k")) == (b"v", None)
    one.flush()
    assert other.get(b"k") == b"v"


def test_close_saves(opened):
    """What was set is there after a close; the closed store has nothing, and takes nothing."""
    store = opened()
    store.set(b"k", b"v")
    store.close()
    store.set(b"l", b"v")
    store.flush()
    store.close()
    assert found(store, b"k", b"l") == [None, None]
    assert found(opened(), b"k", b"l") == [b"v", None]


def test_saved_by_itself(opened, kit):
    """Some time after a set it is saved, and again after the next one."""
    one, other = opened(delay=1e-3), opened()
    for key in (b"a", b"b"):
        one.set(key, b"v")
        assert kit.until(lambda key=key: other.get(key)) == b"v"


def test_the_first_set_counts(opened, monkeypatch):
    """The delay begins with the first set since the last save: later ones do not put it off, and a flush ends it."""
    now, store = [100.0], opened(delay=4.0)
    monkeypatch.setattr("driver.engine.cache.blobs.time.monotonic", lambda: now[0])
    store.set(b"a", b"v")
    now[0] = 103.0
    store.set(b"b", b"v")
    assert store._due == 104.0
    store.flush()
    assert store._due is None
    now[0] = 103.5
    store.set(b"c", b"v")
    assert store._due == 107.5


def test_one_thread_for_many_saves(opened, kit):
    """A hundred sets and flushes start one thread, which a close ends."""
    tasks = Path("/proc/self/task")
    before = {*tasks.iterdir()}
    store = opened(delay=1000.0)
    for n in range(100):
        store.set(b"%d" % n, b"v")
        store.flush()
    (saver,) = {*tasks.iterdir()} - before
    store.close()
    kit.until(lambda: not saver.exists())


def test_use_is_saved(opened):
    """Who was used last is known to the next process, even if it was only read."""
    options = {"max_total_bytes": 6, "select": "lru", "capacity": "fit"}
    store = opened(**options)
    for key in (b"a", b"b", b"c"):
        store.set(key, b"1")
    store.close()
    store = opened(**options)
    store.get(b"a")
    store.close()
    store = opened(**options)
    store.set(b"d", b"1")
    assert found(store, b"a", b"b", b"c", b"d") == [b"1", None, b"1", b"1"]


def test_threads(opened):
    """Eight threads that set, get and flush at once lose nothing, and see only what was set."""
    store, wrong = opened(), []

    def work(n):
        for i in range(40):
            key = b"%d %d" % (n, i)
            store.set(key, key * 3)
            if i % 8 == 0:
                store.flush()
            if store.get(key) != key * 3:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    again = opened()
    assert wrong == []
    assert all(again.get(b"%d %d" % (n, i)) for n in range(8) for i in range(40))


# ---- several of them -------------------------------------------------------------------------------------------------


def test_the_last_save_counts(opened):
    """Two stores that set the same key have, once both have saved, the value that was saved last."""
    one, other = opened(), opened()
    one.set(b"k", b"one")
    other.set(b"k", b"other")
    other.flush()
    assert found(one, b"k") == [b"one"]
    one.flush()
    assert (one.get(b"k"), other.get(b"k")) == (b"one", b"one")


def test_eviction_spares_what_others_set_again(opened):
    """An entry that one store evicts and another has set anew meanwhile stays."""
    options = {"max_total_bytes": 4, "select": "lru", "capacity": "fit"}
    one, other = opened(**options), opened(**options)
    one.set(b"a", b"1")
    one.set(b"b", b"1")
    one.flush()
    one.set(b"c", b"1")  # evicts a
    other.set(b"a", b"2")
    other.flush()
    one.flush()  # finds b to be the one used longest ago
    for store in (one, other, opened(**options)):
        assert found(store, b"a", b"b", b"c") == [b"2", None, b"1"]


def test_the_total_holds_for_all(opened):
    """What two stores save together is no more than the total."""
    options = {"max_total_bytes": 40, "select": "lru", "capacity": "fit"}
    one, other = opened(**options), opened(**options)
    for n in range(10):
        one.set(b"%d" % n, b"one")
        other.set(b"%d" % (10 + n), b"ot")
    one.flush()
    other.flush()
    assert sum(store.get(b"%d" % n) is not None for store in (one, other) for n in range(20)) == 2 * 10


CHILD = """
import sys
from pathlib import Path
from driver.engine.cache.blobs import BlobStore
store = BlobStore(Path(sys.argv[1]), build_id="one", delay=float("inf"))
print("ready", flush=True)
sys.stdin.readline()
for n in range(150):
    store.set(b"child %d" % n, b"v" * n + b"c")
    store.flush()
print("done", flush=True)
sys.stdin.readline()
assert all(store.get(b"parent %d" % n) == b"v" * n + b"p" for n in range(150))
"""


@pytest.mark.integration
def test_two_processes(opened, path, kit):
    """Two processes that save 150 times each at once both see all, and so does who comes later."""
    store = opened()
    with kit.python(CHILD, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("go\n")
        child.stdin.flush()
        for n in range(150):
            store.set(b"parent %d" % n, b"v" * n + b"p")
            store.flush()
        assert child.stdout.readline() == "done\n"
        child.communicate("go\n", timeout=kit.patience)
    assert child.returncode == 0
    for one in (store, opened()):
        assert all(one.get(b"%s %d" % (who, n)) for who in (b"child", b"parent") for n in range(150))


FORK = """
import os, sys
from pathlib import Path
from driver.engine.cache.blobs import BlobStore
store = BlobStore(Path(sys.argv[1]), build_id="one", delay=float("inf"))
store.set(b"before", b"v")
store.flush()
if not os.fork():
    assert store.get(b"before") is None
    store.set(b"child", b"v")
    store.flush()
    assert store.get(b"child") == b"v"
    store.close()
    sys.exit()
assert os.wait()[1] == 0
store.set(b"after", b"v")
store.close()
"""


@pytest.mark.integration
def test_forked_child(opened, path, kit):
    """A forked child has an empty store in memory, and does nothing to its parent's."""
    with kit.python(FORK, path) as parent:
        assert parent.wait(kit.patience) == 0
    assert found(opened(), b"before", b"child", b"after") == [b"v", None, b"v"]


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_key_bytes", 0, "positive"),
        ("max_value_bytes", -1, "positive"),
        ("max_total_bytes", 0, "positive"),
        ("delay", -1.0, "positive"),
        ("delay", float("nan"), "positive"),
        ("select", "oldest", "choose one of random, lru"),
        ("capacity", "half", "choose one of halve, fit, fit_halve"),
    ],
)
def test_arguments_without_sense(path, name, value, remedy):
    """They are refused by name, with the value and what would do, before anything is made."""
    with pytest.raises(ValueError, match=f"{name}={value!r}: .*{remedy}"):
        BlobStore(path, **{"build_id": "one", name: value})
    assert not path.parent.exists()
