"""Packed weights: who shares them, and that no file, damaged or strange, ever changes a result."""

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.encoding import decode, encode, sealed
from driver.nn import Interpreter

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from driver.devices.litert import LiteRtDevice, device, packed
from driver.devices.litert.packed import _HEADER, Cache, PackedMemory, Packing
from driver.devices.litert.weights import Image, aligned

MOST = 10**7


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def cache(folder):
    return Cache(folder, MOST)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Models of any size take part."""
    monkeypatch.setattr(packed, "SMALLEST", 0)


def now():
    """No burst wants to run."""


def litert(cache=None, threads=1):
    """A device with its own memory of what it has compiled, as another process would have it."""
    found = LiteRtDevice(threads=threads)
    found._packing = Packing(cache)
    return found


def sent(model):
    """As it arrives."""
    fd, where = encode(model)
    return decode(sealed(fd), where)


def dense(seed=0, size=40, changed=0.0):
    """x times random weights, as a client sends it; `changed` is added to the last weight."""
    weights = np.random.default_rng(seed).standard_normal((size, size), np.float32)
    weights[-1, -1] += changed
    builder = driver.ModelBuilder()
    x = builder.input("float32", (1, size))
    builder.output(builder.operation("FULLY_CONNECTED", x, weights, np.zeros(size, np.float32), 0))
    return sent(builder.build())


def prepare(on, model):
    """The prepared model, and its packed weights."""
    prepared = on.prepare(model, now)
    (program,) = prepared._programs.values()
    return prepared, program.compiled.packed


def outputs(prepared, model):
    """What it computes of seeded inputs, and what the reference does."""
    random, feeds = np.random.default_rng(2), []
    for operand in (model.main.operands[i] for i in model.main.inputs):
        raw = random.integers(0, 256, operand.dimensions).astype(np.uint8)
        raw = raw.view(operand.type.dtype) if operand.type.is_quantised else (raw / 64 - 2).astype(np.float32)
        feeds.append(raw)
    expected = Interpreter(model).bind(feeds)
    expected.run()
    wanted = [tensor.array for tensor in expected.results]
    found = [aligned(array.nbytes) for array in wanted]
    prepared.bind(feeds, found).run()
    return [(raw.view(array.dtype).reshape(array.shape), array) for raw, array in zip(found, wanted, strict=True)]


def excess(prepared, model):
    """By how much the worst output is off."""
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in outputs(prepared, model))


def files(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- one process -------------------------------------------------------------------------------------------------


def test_same_bytes_share():
    """Models of the same bytes have one packed copy; one bit of a weight makes another."""
    on = litert()
    kept = [prepare(on, model) for model in (dense(), dense(), dense(changed=1e-3), dense(1))]
    memories = [memory for _, memory in kept]
    assert memories[0] is memories[1]
    assert len(set(memories)) == 3
    for (prepared, _), model in zip(kept, (dense(), dense(), dense(changed=1e-3), dense(1)), strict=True):
        assert excess(prepared, model) < 1e-4


def test_one_copy_in_memory():
    """Ten prepared models of 4 MB of weights map one packed copy, and cost far less than ten."""
    on, model = litert(), dense(size=1000)
    first = prepare(on, model)
    before = _proportional()
    more = [prepare(on, model) for _ in range(9)]
    assert {memory for _, memory in more} == {first[1]}
    assert len({line.split()[4] for line in _maps()}) == 1  # their inode
    assert all(excess(prepared, model) < 1e-2 for prepared, _ in more)
    assert _proportional() - before < 9 * 4e6 / 2


def _maps():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "burst-packed" in line]


def _proportional():
    """Bytes that this process needs, without those that several mappings show."""
    gc.collect()
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


def test_the_first_may_go():
    """Shared weights last as long as one model that uses them, and then leave neither mapping nor descriptor."""
    on, model = litert(), dense()
    before = _descriptors()
    first, memory = prepare(on, model)
    second = prepare(on, model)[0]
    del first
    gc.collect()
    third, same = prepare(on, model)
    assert same is memory
    assert excess(second, model) < 1e-4
    assert excess(third, model) < 1e-4
    del second, third, same, memory
    assert _descriptors() == before == []
    assert _maps() == []


def _descriptors():
    """Of packed weights, in this process."""
    gc.collect()
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            found.append(str(path.readlink()))
    return [target for target in found if "burst-packed" in target]


def test_nobody_changes_them():
    """Once packed, weights cannot be written to, or cut off, through any descriptor of theirs."""
    _, memory = prepare(litert(), dense())
    for fd in (memory.fd, os.open(memory.path, os.O_RDWR | os.O_CLOEXEC)):
        for change in (lambda: os.pwrite(fd, b"x", 100), lambda: os.ftruncate(fd, 10)):  # noqa: B023
            with pytest.raises(PermissionError):
                change()
    os.close(fd)


def test_frozen_on_older_systems(monkeypatch):
    """Where the mapping that XNNPACK has forbids the seal against writing, the one against new writers does it."""
    seal, model = packed.fcntl.fcntl, dense()

    def busy(fd, command, seals):
        if seals & packed.fcntl.F_SEAL_WRITE:
            raise OSError("busy")
        return seal(fd, command, seals)

    with monkeypatch.context() as patch:
        patch.setattr(packed.fcntl, "fcntl", busy)
        prepared, memory = prepare(litert(), model)
    with pytest.raises(PermissionError):
        os.pwrite(memory.fd, b"x", 100)
    assert excess(prepared, model) < 1e-4


def shared_weights(build):
    """Two layers with the same weights for inputs with different zero points."""
    builder, random = driver.ModelBuilder(), np.random.default_rng(5)
    raw = random.integers(-128, 128, (32, 32)).astype(np.int8)
    weights = build(builder, raw)
    bias = builder.constant(np.arange(32, dtype=np.int32), scale=0.02 * 0.05)
    results = []
    for zero_point, of in zip((-28, -125), weights, strict=True):
        x = builder.input("quant8_asymm_signed", (1, 32), scale=0.05, zero_point=zero_point)
        results.append(builder.operation("FULLY_CONNECTED", x, of, bias, 0, scale=0.5, zero_point=0))
    builder.output(*results)
    return sent(builder.build())


def one_operand(builder, raw):
    return (builder.constant(raw, dtype="quant8_asymm_signed", scale=0.02, zero_point=0),) * 2


def test_weights_that_are_read_twice():
    """XNNPACK would compute both layers with what it packed for the first: such a model shares nothing and is right."""
    model = shared_weights(one_operand)
    prepared, memory = prepare(litert(), model)
    assert memory is None
    assert excess(prepared, model) <= 1


def test_why(monkeypatch):
    """The fault that the rule above is for. When this fails, LiteRT has mended it, and the rule may go."""
    model = shared_weights(one_operand)
    monkeypatch.setattr(Image, "shareable", property(lambda _: True, lambda _, __: None), raising=False)
    prepared, memory = prepare(litert(), model)
    assert memory is not None
    assert excess(prepared, model) > 50


def test_biases_that_are_read_twice():
    """Layers with weights of their own may have one bias: such a model shares, and is right packed and found."""
    model = shared_weights(
        lambda builder, raw: tuple(
            builder.constant(each, dtype="quant8_asymm_signed", scale=0.02, zero_point=0) for each in (raw, raw[::-1])
        )
    )
    on = litert()
    kept = [prepare(on, model) for _ in range(2)]
    assert kept[0][1] is kept[1][1] is not None
    assert all(excess(prepared, model) <= 1 for prepared, _ in kept)


def test_weights_at_the_same_place():
    """Two operands of which a client says that they lie at the same place are the same weights."""
    two = shared_weights(
        lambda builder, raw: tuple(
            builder.constant(raw, dtype="quant8_asymm_signed", scale=0.02, zero_point=0) for _ in range(2)
        )
    )
    assert prepare(litert(), two)[1] is not None  # two places
    operands = two.main.operands
    places = [i for i, o in enumerate(operands) if o.lifetime.is_constant and len(o.dimensions) == 2]
    assert len(places) == 2
    object.__setattr__(operands[places[1]], "value", operands[places[0]].value)
    prepared, memory = prepare(litert(), two)
    assert memory is None
    assert excess(prepared, two) <= 1


def test_without_descriptors(monkeypatch):
    """Who cannot have another descriptor gets packed weights of its own."""

    def none(*_):
        raise OSError(24, "too many open files")

    model = dense()
    monkeypatch.setattr(packed.os, "memfd_create", none)
    prepared, memory = prepare(litert(), model)
    assert memory is None
    assert excess(prepared, model) < 1e-4


def test_small_models_are_left_alone(monkeypatch):
    """Below the limit nothing is shared: it would cost more than it saves."""
    monkeypatch.setattr(packed, "SMALLEST", 10**6)
    assert prepare(litert(), dense())[1] is None


# ---- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["conv_model", "quantised_model"])
def test_another_process_takes_it(kit, cache, folder, make):
    """A later process finds what one has kept, and computes what that does to the last bit."""
    model = sent(getattr(kit, make)())
    first, memory = prepare(litert(cache), model)
    kept = files(folder)
    taken = cache.read(bytes.fromhex(kept[0].removesuffix(".packed")))
    assert len(kept) == 1
    assert taken.digest() == memory.digest()
    second, found = prepare(litert(Cache(folder, MOST), threads=2), model)
    assert found is not memory
    assert found.digest() == memory.digest()
    plain = LiteRtDevice(threads=2).prepare(model, now)
    for (a, _), (b, _), (c, _) in zip(*(outputs(p, model) for p in (first, second, plain)), strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)


def test_access(cache, folder):
    """Nobody else may look into the folder or its files, whatever there was before and whatever the umask is."""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    before = os.umask(0)
    try:
        prepare(litert(cache), dense())
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o7777 == 0o700
    assert [path.stat().st_mode & 0o7777 for path in folder.iterdir()] == [0o600]


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def cut_short(path):
    os.truncate(path, 30)


def empty(path):
    path.write_bytes(b"")


def longer(path):
    path.write_bytes(path.read_bytes() + b"\0")


def flipped(offset):
    def flip(path):
        raw = bytearray(path.read_bytes())
        raw[offset] ^= 4
        path.write_bytes(raw)

    flip.__name__ = f"a bit of byte {offset}"
    return flip


def zeroed(path):
    raw = bytearray(path.read_bytes())
    raw[2000:3000] = bytes(1000)
    path.write_bytes(raw)


def swapped(path):
    """The entry of another model of the same shape, under this one's name."""
    apart = path.parent.with_name("other")
    prepare(litert(Cache(apart, MOST)), dense(9))
    next(apart.iterdir()).rename(path)


def mixed(path):
    """The weights of another model of the same shape, behind this one's header."""
    apart = path.parent.with_name("other")
    prepare(litert(Cache(apart, MOST)), dense(9))
    other = next(apart.iterdir()).read_bytes()
    path.write_bytes(path.read_bytes()[: _HEADER.size] + other[_HEADER.size :])


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def unreadable(path):
    path.unlink()
    path.mkdir()


def huge(path):
    header = _HEADER.pack(b"burstpw1", bytes.fromhex(path.stem), 2**62, bytes(32))
    path.write_bytes(header + path.read_bytes()[_HEADER.size :])


FLIPS = [flipped(n) for n in (0, 20, 42, 60, 82, 150, 3000, -1)]
DAMAGES = [cut, cut_short, empty, longer, zeroed, swapped, mixed, link, pipe, unreadable, huge, *FLIPS]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damage(cache, folder, damage):
    """Whatever happened to the file: the weights are packed again and right, and the entry is whole after that."""
    model = dense()
    _, memory = prepare(litert(cache), model)
    (path,) = folder.iterdir()
    key = bytes.fromhex(path.stem)
    damage(path)
    assert cache.read(key) is None
    prepared, _ = prepare(litert(cache), model)
    assert excess(prepared, model) < 1e-4
    if damage is not unreadable:  # which we do not remove
        assert cache.read(key).digest() == memory.digest()


def test_other_versions_and_processors(monkeypatch, cache, folder):
    """What another version of LiteRT packed, or for another processor, is another entry."""
    on, model = litert(cache), dense()
    kept = [prepare(on, model)]
    for name, value in (("VERSION", "2.2.0"), ("_processor", lambda: b"Z80")):
        with monkeypatch.context() as patch:
            patch.setattr(packed, name, value)
            kept.append(prepare(litert(cache), model))
    assert len(files(folder)) == 3


def test_what_is_used_was_verified(cache, folder):
    """A file that changes after it was verified changes nothing: what is used is a sealed copy."""
    model = dense()
    prepare(litert(cache), model)
    prepared, memory = prepare(litert(cache), model)
    (path,) = folder.iterdir()
    before = memory.digest()
    path.write_bytes(bytes(path.stat().st_size))
    assert memory.digest() == before
    assert excess(prepared, model) < 1e-4


@pytest.mark.parametrize("rounds", [300, pytest.param(10_000, marks=pytest.mark.stress)])
def test_random_damage(cache, folder, rounds):
    """No random change of a file is taken for the entry."""
    prepare(litert(cache), dense())
    (path,) = folder.iterdir()
    whole, key = path.read_bytes(), bytes.fromhex(path.stem)
    random = np.random.default_rng(rounds)
    for _ in range(rounds):
        raw = changed(bytearray(whole), random)
        path.write_bytes(raw)
        assert (cache.read(key) is None) == (raw != whole)
    path.write_bytes(whole)
    assert cache.read(key) is not None


def changed(raw, random):
    """With bits flipped, a stretch overwritten, moved or left out, or an end that is missing or too long."""
    start, stop = sorted(int(n) for n in random.integers(0, len(raw) + 1, 2))
    match random.integers(6):
        case 0:
            for bit in random.integers(0, 8 * len(raw), random.integers(1, 4)).tolist():
                raw[bit // 8] ^= 1 << bit % 8
        case 1:
            raw[start:stop] = random.bytes(stop - start)
        case 2:
            raw[start:stop] = bytes(stop - start)
        case 3:
            raw[start:stop] = raw[: stop - start]
        case 4:
            del raw[start:stop]
        case 5:
            raw += random.bytes(int(random.integers(1, 200)))
    return raw


WRITER = """
import os, signal, sys
from pathlib import Path
from driver.devices.litert import packed
folder, key, source, left = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), sys.argv[3], int(sys.argv[4])
memory = packed.PackedMemory()
os.write(memory.fd, Path(source).read_bytes())
memory.freeze()
def deadly(function):
    def call(*args, **more):
        global left
        left -= 1
        if left == 0 and function is sendfile:
            sendfile(args[0], args[1], args[2], args[3] // 2)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)
    return call
sendfile = os.sendfile
for name in ("mkdir", "listdir", "open", "fchmod", "write", "sendfile", "replace"):
    setattr(os, name, deadly(getattr(os, name)))
packed.Cache(folder, 10**7).write(key, memory)
"""


def test_killed_while_writing(tmp_path):
    """A process that is killed at any step of writing leaves an entry that verifies, or none; the next one writes."""
    source, key = tmp_path / "weights", bytes(range(32))
    source.write_bytes(np.random.default_rng(0).bytes(50_000))
    found = []
    for step in itertools.count(1):
        cache = Cache(tmp_path / str(step), MOST)
        arguments = [sys.executable, "-c", WRITER, cache._folder, key.hex(), source, str(step)]
        end = subprocess.run(arguments, check=False).returncode
        memory = cache.read(key)
        found.append(memory is not None)
        if memory is None:
            memory = PackedMemory()
            os.write(memory.fd, source.read_bytes())
            cache.write(key, memory)
            memory = cache.read(key)
        assert os.pread(memory.fd, 60_000, 0) == source.read_bytes()
        if not end:
            break
        assert end == -signal.SIGKILL
    assert found == sorted(found)
    assert found.count(False) >= 7


def test_only_one_writes(cache, folder):
    """While a process is writing, another uses what it has packed and keeps nothing."""
    model = dense()
    folder.mkdir()
    other = os.open(folder, os.O_RDONLY)
    packed.fcntl.flock(other, packed.fcntl.LOCK_EX)
    prepared, _ = prepare(litert(cache), model)
    assert files(folder) == []
    os.close(other)
    prepare(litert(cache), model)
    assert len(files(folder)) == 1
    assert excess(prepared, model) < 1e-4


PREPARER = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import test_litert_packed as tests
tests.packed.SMALLEST = 0
models = [tests.dense(seed) for seed in range(20)]
print("ready", flush=True)
sys.stdin.readline()
on = tests.litert(tests.Cache(Path(sys.argv[2]), tests.MOST))
print(max(tests.excess(tests.prepare(on, model)[0], model) for model in models))
"""


def test_two_processes_at_once(cache, folder):
    """Two processes that prepare the same models at the same time are both right, and leave only whole entries."""
    arguments = [sys.executable, "-c", PREPARER, Path(__file__).parent, folder]
    both = [subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in both:
        assert float(process.communicate()[0]) < 1e-4
        assert process.returncode == 0
    entries = [name for name in files(folder) if name.endswith(".packed")]
    assert entries
    assert all(cache.read(bytes.fromhex(name.removesuffix(".packed"))) for name in entries)


def test_many_at_once(folder):
    """Writers and readers of the same entries at the same time never see anything but whole ones."""
    keys = [bytes([n]) * 32 for n in range(3)]
    contents = [np.random.default_rng(n).bytes(30_000) for n in range(3)]
    wrong, whole = [], []

    def work(seed):
        cache, random = Cache(folder, 100_000), np.random.default_rng(seed)
        for n in random.integers(0, 3, 60).tolist():
            memory = PackedMemory()
            os.write(memory.fd, contents[n])
            cache.write(keys[n], memory)
            found = cache.read(keys[n])
            if found is not None:
                (whole if os.pread(found.fd, 40_000, 0) == contents[n] else wrong).append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(whole) > 100


def test_the_oldest_go(folder):
    """Above its size the cache drops what was used longest ago; what is larger than all of it is not kept."""
    cache, keys = Cache(folder, 3 * (1000 + _HEADER.size)), [bytes([n]) * 32 for n in range(5)]
    memory = PackedMemory()
    os.write(memory.fd, bytes(1000))
    for age, key in enumerate(keys[:3]):
        cache.write(key, memory)
        os.utime(folder / packed._name(key), (age, age))
    assert cache.read(keys[0]) is not None  # used just now
    cache.write(keys[3], memory)
    assert files(folder) == [packed._name(keys[n]) for n in (0, 2, 3)]
    os.write(memory.fd, bytes(3000))
    cache.write(keys[4], memory)
    assert files(folder) == [packed._name(keys[n]) for n in (0, 2, 3)]


def test_a_folder_that_cannot_be_used(tmp_path, caplog):
    """Without a place for files models are prepared nevertheless, and the log says what is wrong."""
    (tmp_path / "cache").write_text("a file")
    model = dense()
    prepared, _ = prepare(litert(Cache(tmp_path / "cache", MOST)), model)
    assert excess(prepared, model) < 1e-4
    assert "cache" in caplog.text


def test_without_blake3(monkeypatch, folder):
    """A cache without what verifies it says what to install."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    with pytest.raises(ImportError, match=r"blake3; pip install 'burst-engine\[litert\]'"):
        Cache(folder, MOST)


def test_options(monkeypatch, tmp_path):
    """The configuration turns the cache on and limits it; what makes no sense is refused by name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LiteRtDevice()._packing._cache is None
    file = tmp_path / ".config/burst/litert.toml"
    file.parent.mkdir(parents=True)
    for text, most in (("cache = true", device.CACHE_MB), ("cache = true\ncache_mb = 7", 7)):
        file.write_text(text)
        found = LiteRtDevice()._packing._cache
        assert (found._folder, found._most) == (tmp_path / ".cache/burst/litert", most * 10**6)
    file.write_text("cache = false\ncache_mb = 7")
    assert LiteRtDevice()._packing._cache is None
    for bad in ("cache = 1", "cache = 'yes'", "cache_mb = 0", "cache_mb = 1.5", "cache_mb = true", "cache_mb = -3"):
        file.write_text(bad)
        with pytest.raises(ValueError, match=rf"litert\.toml: {bad.split()[0]} = "):
            LiteRtDevice()


def test_device_processes(monkeypatch, tmp_path, place):
    """A device with a cache keeps an entry; the next one takes it, and a third finds it damaged and packs again."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".config/burst/litert.toml"
    file.parent.mkdir(parents=True)
    file.write_text("cache = true")
    model, folder = dense(size=600), tmp_path / ".cache/burst/litert"
    assert sum(o.value.nbytes for o in model.main.operands if o.lifetime.is_constant) > 2**20
    x = np.random.default_rng(3).standard_normal((1, 600), np.float32)
    results, digests = [], []
    for number in range(3):
        with driver.connect("litert") as found, found.prepare(model) as prepared:
            results.append(prepared.run(x)[0])
            log = next(place.path.glob("*.log")).read_text()
        place.clear()
        assert ("damaged" in log) == (number == 2)
        (path,) = folder.iterdir()
        digests.append(path.read_bytes())
        if number == 1:
            path.write_bytes(digests[0][:5000] + b"????" + digests[0][5004:])
    assert digests[0] == digests[1] == digests[2]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
    assert path.stat().st_mode & 0o7777 == 0o600
