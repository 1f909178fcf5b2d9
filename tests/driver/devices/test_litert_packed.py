"""Packed weights: who shares them, and who must not."""

import contextlib
import gc
import os
from pathlib import Path

import numpy as np
import pytest
from inside import programs_of
from sent_models import arrived

import driver
from driver.nn import Interpreter

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from driver.devices.litert import LiteRtDevice, packed
from driver.devices.litert.weights import Image, aligned
from driver.interface import BindOptions, Preparation


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Models of any size take part."""
    monkeypatch.setattr(packed, "SMALLEST", 0)


def now():
    """No burst wants to run."""


def litert(threads=1):
    """A device with its own memory of what it has compiled, as another process would have it."""
    return LiteRtDevice(threads=threads)


def sent(model):
    """As it arrives."""
    return arrived(model)


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
    prepared = on.prepare(model, Preparation())
    (program,) = programs_of(prepared).values()
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
    prepared.bind(feeds, found, BindOptions()).run()
    return [(raw.view(array.dtype).reshape(array.shape), array) for raw, array in zip(found, wanted, strict=True)]


def excess(prepared, model):
    """By how much the worst output is off."""
    return max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in outputs(prepared, model))


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
