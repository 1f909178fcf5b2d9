"""Random nets: each computes in a device what it computes in ONNX Runtime in this process."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
import stress
from onnx_nets import drawn, joined, own_results

import driver
from driver.errors import ImportFailed

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

TOGETHER = 10
"""Nets that become one file: most of the time goes into files."""
NEAR = 1e-3
"""Times the largest value: how far apart the operations form may be, whose sums are in another order."""


class OwnRuntime:
    """ONNX Runtime in a process of its own, which some nets end: a transpose after an If, and quantised steps."""

    def __init__(self):
        self._pool = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._pool:
            self._pool.shutdown()

    def run(self, net):
        """The results for each set of inputs; None: it takes no such net."""
        self._pool = self._pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            return self._pool.submit(own_results, net.data(), net.feeds).result()
        except BrokenProcessPool:
            self._pool = None
            return None


def is_same(found, wanted):
    """Whether an output has the type, the shape and the bits."""
    return (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def is_near(found, wanted):
    """Whether it has the shape, and nearly the values; of the HAL's types, int32 for int64 and float32 for float64."""
    if found.shape != wanted.shape:
        return False
    with np.errstate(all="ignore"):
        most = np.abs(wanted[np.isfinite(wanted)]).max(initial=1)
        return bool(np.allclose(found, wanted, rtol=NEAR, atol=NEAR * most, equal_nan=True))


def differing(model, net, wanted, alike, **options):
    """The ways and names of outputs of a model that are not as wanted."""
    names, found = [name for name, *_ in net.outputs], set()

    def look(way, results, expected):
        found.update((way, n) for n, *pair in zip(names, results, expected, strict=True) if not alike(*pair))

    with driver.compile(model, devices=["onnxruntime"], **options) as compiled, compiled.burst() as burst:
        for feed, expected in zip(net.feeds, wanted, strict=True):
            look("run", compiled.run(**feed), expected)
            look("burst", burst.run(**feed).outputs, expected)
            look("known request", burst.run(**feed).outputs, expected)
    return found


def is_loadable(net, path):
    """Whether a net has a form of operations."""
    path.write_bytes(net.data())
    try:
        driver.load(path, form="operations")
    except ImportFailed:
        return False
    return True


def differences(nets, folder, own):
    """What devices compute wrongly of nets side by side, in words: by form, start, way and output."""
    path, found = folder / "net.onnx", []
    smooth = [net for net in nets if net.is_smooth and is_loadable(net, path)]
    cached = {"cache_dir": folder / "cache"}
    for name, form, parts, alike, options in (
        ("first start", "file", nets, is_same, cached),
        ("cached start", "file", nets, is_same, cached),
        ("auto", "auto", nets, is_same, {}),
        ("operations", "operations", smooth, is_near, {}),
    ):
        if not parts:
            continue
        net = joined(parts)
        path.write_bytes(net.data())
        try:
            wrong = differing(driver.load(path, form=form), net, own.run(net), alike, **options)
        except driver.DriverError as error:
            wrong = {(error, "")}
        found += [f"{name}, {way}: {output}" for way, output in sorted(tuple(map(str, each)) for each in wrong)]
    return found


def judge(first, count, folder, own):
    """Draws so many nets that ONNX Runtime takes, and says what differs."""
    nets, seed, wrong = [], first, []
    while len(nets) < count:
        net = drawn(seed)
        nets += [net] if own.run(net) else []
        seed += 1
        assert seed - first < 2 * count + 10
    for n in range(0, count, TOGETHER):
        part = nets[n : n + TOGETHER]
        if differences(part, folder, own):
            wrong += [f"{words} of {net}" for net in part for words in differences([net], folder, own)] or [
                f"only together: {part}"
            ]
    assert wrong == [], "\n".join([f"{len(wrong)} differences", *wrong[:10]])


@pytest.fixture(scope="module")
def own():
    with OwnRuntime() as runtime:
        yield runtime


def test_a_few_nets(connect, own, tmp_path):
    """Bit for bit in the file form, first, from the cache and by itself; nearly in the operations form."""
    connect("onnxruntime")
    judge(0, TOGETHER, tmp_path, own)


@pytest.mark.integration
@pytest.mark.parametrize("part", range(4))
def test_two_thousand_nets(connect, own, tmp_path, part):
    """The same of 2,000."""
    connect("onnxruntime")
    judge(1_000 * part + 100, 500, tmp_path, own)


@pytest.mark.stress
def test_other_nets(connect, own, tmp_path):
    """The same of others each time."""
    connect("onnxruntime")
    for _ in range(stress.times(200)):
        judge(int(np.random.default_rng().integers(1 << 40)), 100, tmp_path, own)
