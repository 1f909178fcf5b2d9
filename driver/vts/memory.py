"""memory: arguments may lie in any pool, at any offset; a device writes to its outputs only.

Pools of other kinds are parts of files, hardware buffers and images; a descriptor that is not a pool is refused.
"""

from __future__ import annotations

import mmap
import os
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import ErrorStatus, HardwareBuffer, Memory, Request, RequestArgument, Usage
from burst.images import FORMATS
from driver.nn import ModelBuilder
from driver.vts import domains, own_memory
from driver.vts.bench import JUNK, ArgumentPlace, answer, output_sizes, refusal, request
from driver.vts.burst import plain
from driver.vts.kit import Test, check, skip
from driver.vts.operations import check_bare, prepared
from driver.vts.samples import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from driver.client.prepared_model import RemotePreparedModel
    from driver.nn import Model
    from driver.vts.bench import Execute
    from driver.vts.cases import Case
    from driver.vts.target import Target

    Layout = Callable[[int], list[ArgumentPlace]]

_ROOM = 4096  # bytes for each argument: a page
_SAMPLES = ("add", "quantised", "chain")
_WIDTH, _HEIGHT = 6, 4
_GAP, _STRIDE = 4096, 256  # strides of planes and rows, for images with gaps
_TYPES: dict[str, dict[str, Any]] = {
    "uint8": {"dtype": "quant8_asymm", "scale": 0.5, "zero_point": 40},
    "float16": {"dtype": "float16"},
    "float32": {"dtype": "float32"},
}
_INVALID, _GENERAL = ErrorStatus.INVALID_ARGUMENT, ErrorStatus.GENERAL_FAILURE


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    for layout in _LAYOUTS:
        for name in _SAMPLES:
            yield Test(f"memory/{layout}/{name}", partial(lay_out, layout, name))
    yield Test("memory/shared_input", shared_input)
    yield Test("memory/out_of_bounds", out_of_bounds)
    yield Test("memory/freed", freed)
    yield from domains.tests()
    yield from own_memory.tests()
    for name in FORMATS:
        for layout in ("packed", "padded"):
            yield Test(f"memory/hardware_buffer/{name}/{layout}", partial(images, name, layout == "padded"))
    for name, argument in _MISUSED.items():
        yield Test(f"memory/hardware_buffer/{name}", partial(misused, argument))
    for kind, pool in _READ_ONLY.items():
        yield Test(f"memory/read_only/{kind}", partial(read_only, pool))
    for name, (said, status) in _SAID.items():
        yield Test(f"memory/{name}", partial(unusable, said, status))


# ---- pools of bytes


def part_of_memory(nbytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> Memory:
    """Return a pool of kind mmap_fd that begins at the second page."""
    with _memfd(mmap.PAGESIZE + nbytes) as fd:
        return Memory.from_fd(fd, nbytes, protection, mmap.PAGESIZE)


def blob(nbytes: int, usage: int = Usage.CPU_READ | Usage.CPU_WRITE) -> Memory:
    """Return a pool of kind hardware_buffer_blob."""
    with _memfd(nbytes) as fd:
        return Memory.from_hardware_buffer(fd, "blob", nbytes, usage=usage)


@contextmanager
def _memfd(nbytes: int) -> Iterator[int]:
    fd = os.memfd_create("burst-vts", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        yield fd
    finally:
        os.close(fd)


# ---- images


def images(name: str, is_padded: bool, target: Target) -> None:
    """Image inputs and outputs give the same as plain memory, on both paths; bytes between rows stay unchanged."""
    source, result = _image(name, is_padded), _image(name, is_padded)
    whole = _values(source)
    with _prepared(source, target) as model, model.burst() as burst:
        for run in _both(model, burst, target):
            expected = _plain(run, whole)
            source.scatter(whole)
            result.asarray()[:] = 0x5A
            found = refusal(run, Request((RequestArgument(),), (RequestArgument(pool=1),), (source, result)))
            check(not found.status, f"the device returns {found.status.name}: {found.message}")
            check(result.read().tobytes() == expected, "the image differs from the same output in plain memory")
            check(source.read().tobytes() == whole.tobytes(), "the device changed its input")
            result.scatter(np.full(result.shape, 0, result.dtype))
            rest = result.asarray()
            check(int((rest == 0x5A).sum()) == rest.nbytes - whole.nbytes, "bytes between the rows were changed")


def _image(name: str, is_padded: bool) -> HardwareBuffer:
    planes = [(n * _GAP, _STRIDE) for n in range(len(FORMATS[name].parts))]
    return HardwareBuffer.allocate(name, _WIDTH, _HEIGHT, planes if is_padded else None)


def _values(image: HardwareBuffer) -> Any:
    count = int(np.prod(image.shape))
    return (np.arange(count) % 100 - (image.dtype.kind == "f") * 50).astype(image.dtype).reshape(image.shape)


def _model(image: HardwareBuffer) -> Model:
    m = ModelBuilder()
    m.output(m.operation("RELU", m.input(dimensions=image.shape, **_TYPES[image.dtype.name])))
    return m.build()


@contextmanager
def _prepared(image: HardwareBuffer, target: Target) -> Iterator[RemotePreparedModel]:
    model = _model(image)
    if not all(target.supported(model)):
        skip("the device does not support the model")
    with target.prepared(model) as found:
        yield found


def _both(model: RemotePreparedModel, burst: Any, target: Target) -> list[Execute]:
    return [partial(way, timeout=target.patience) for way in (model.execute, burst.execute)]


def _plain(run: Execute, whole: Any) -> bytes:
    pool, nbytes = Memory.create(2 * whole.nbytes), whole.nbytes
    pool.asarray(whole.dtype, whole.shape)[...] = whole
    arguments = RequestArgument(length=nbytes), RequestArgument(offset=nbytes, length=nbytes)
    found = answer(run, Request(arguments[:1], arguments[1:], (pool,)))
    check(not found.status, f"in plain memory the device returns {found.status.name}: {found.message}")
    if any(shape.dimensions != whole.shape for shape in found.shapes):
        skip("the device returns another output shape, in plain memory too")
    return found.outputs[0].tobytes()


_MISUSED = {
    "offset": RequestArgument(offset=4),
    "length": RequestArgument(length=_WIDTH * _HEIGHT * 4),
    "dimensions": RequestArgument(dimensions=(1, _WIDTH, _HEIGHT, 4)),
}


def misused(argument: RequestArgument, target: Target) -> None:
    """An image is used whole, with its own shape; anything else gets INVALID_ARGUMENT on both paths."""
    image, pool = _image("rgba", is_padded=False), Memory.create(_WIDTH * _HEIGHT * 4)
    plain = RequestArgument(pool=1, length=pool.nbytes)
    with _prepared(image, target) as model, model.burst() as burst:
        for run in _both(model, burst, target):
            for inputs, outputs in (((argument,), (plain,)), ((plain,), (argument,))):
                _check_refused(run, Request(inputs, outputs, (image, pool)), _INVALID)


# ---- what is refused


_READ_ONLY: dict[str, Callable[[int], Memory]] = {
    "mmap_fd": partial(part_of_memory, protection=mmap.PROT_READ),
    "hardware_buffer_blob": partial(blob, usage=Usage.CPU_READ),
}


def read_only(make: Callable[[int], Memory], target: Target) -> None:
    """Read-only memory can be an input, but not an output."""
    image = _image("gray_float32", is_padded=False)
    nbytes = image.nbytes
    pool, other = make(nbytes), Memory.create(nbytes)
    first, second = RequestArgument(length=nbytes), RequestArgument(pool=1, length=nbytes)
    with _prepared(image, target) as model, model.burst() as burst:
        for run in _both(model, burst, target):
            found = refusal(run, Request((first,), (second,), (pool, other)))
            check(not found.status, f"a read-only input gets {found.status.name}: {found.message}")
            _check_refused(run, Request((second,), (first,), (pool, other)), _INVALID)


_SAID: dict[str, tuple[list[Any], ErrorStatus]] = {
    "unknown_kind": (["no_such_kind", 4096, True], _INVALID),
    "unmappable/too_short": (["mmap_fd", 1 << 20, mmap.PROT_READ, 0], _GENERAL),
    "unmappable/unaligned": (["mmap_fd", 16, mmap.PROT_READ, 8], _GENERAL),
    "unmappable/blob": (["hardware_buffer_blob", 1 << 20, 3], _GENERAL),
    "unmappable/format": (["hardware_buffer", "no_such_format", 6, 4, [[0, 24]], 0x33], _GENERAL),
    "unmappable/stride": (["hardware_buffer", "rgba", 6, 4, [[0, 1 << 40]], 0x33], _GENERAL),
    "unmappable/planes": (["hardware_buffer", "nv12", 6, 4, [[0, 6]], 0x33], _GENERAL),
}


class _Mislabelled(Memory):
    """Memory that is described as another kind than it is."""

    said: list[Any]

    def to_wire(self) -> list[Any]:
        return self.said


def unusable(said: list[Any], status: ErrorStatus, target: Target) -> None:
    """An invalid pool is refused on use; the same memory, described correctly, is accepted afterwards."""
    image = _image("gray_float32", is_padded=False)
    pool, nbytes = _Mislabelled.create(mmap.PAGESIZE), image.nbytes
    asked = Request((RequestArgument(length=nbytes),), (RequestArgument(offset=1024, length=nbytes),), (pool,))
    with _prepared(image, target) as model, model.burst() as burst:
        for run in _both(model, burst, target):
            pool.said = said
            _check_refused(run, asked, status)
            model.device.free_memory(pool)
            burst.free_memory(pool)
            pool.said = Memory.to_wire(pool)
            found = refusal(run, asked)
            check(
                not found.status,
                f"afterwards, the same memory described correctly gets {found.status.name}: {found.message}",
            )


def _check_refused(run: Execute, asked: Request, status: ErrorStatus, what: str = "it") -> None:
    found = refusal(run, asked)
    check(found.status == status, f"{what} gets {found.status.name}, not {status.name}")
    check_bare(found)


# ---- arguments at any place in any pool


def _one_pool(offset: int, count: int) -> list[ArgumentPlace]:
    pool = Memory.create(count * _ROOM)
    return [ArgumentPlace(pool, n * _ROOM + offset) for n in range(count)]


def _pool_each(make: Callable[[int], Memory], count: int) -> list[ArgumentPlace]:
    return [ArgumentPlace(make(_ROOM), 64) for _ in range(count)]


def _last_bytes(count: int) -> list[ArgumentPlace]:
    """Return arguments without gaps at the end of a pool: a write beyond an output damages the next argument."""
    return [ArgumentPlace(Memory.create(3 * _ROOM), 2 * _ROOM + 64 * n) for n in range(count)]


_LAYOUTS: dict[str, Layout] = {
    "one_pool": partial(_one_pool, 0),
    "one_pool_offset": partial(_one_pool, 64),
    "aligned_to_four": partial(_one_pool, 12),
    "pool_each": partial(_pool_each, Memory.create),
    "posix": partial(_pool_each, partial(Memory.create, kind="posix")),
    "mmap_fd": partial(_pool_each, part_of_memory),
    "hardware_buffer_blob": partial(_pool_each, blob),
    "large_pools": _last_bytes,
}


def lay_out(layout: str, name: str, target: Target) -> None:
    """Any layout gives the same result, on both paths; the bytes around the outputs stay unchanged."""
    case = sample(name)
    with prepared(case, target) as model, model.burst() as burst:
        expected = plain(model, case, target)
        places = _LAYOUTS[layout](len(case.feeds) + len(case.expected))
        for run in (model.execute, burst.execute):
            _check(case, expected, places, partial(run, timeout=target.patience))


def _check(case: Case, expected: list[bytes], places: Sequence[ArgumentPlace], run: Execute) -> None:
    pools = {place.pool: None for place in places}
    for pool in pools:
        pool.asarray()[:] = JUNK
    asked = request(case, places, output_sizes(case))
    before = {pool: pool.asarray().copy() for pool in pools}
    found = answer(run, asked)
    check(not found.status, f"the device returns {found.status.name}: {found.message}")
    for number, (output, wanted) in enumerate(zip(found.outputs, expected, strict=True)):
        check(output.tobytes() == wanted, f"output {number} differs from that of the first layout")
    for place, argument in zip(places[len(case.feeds) :], asked.outputs, strict=True):
        before[place.pool][argument.offset : argument.offset + argument.length] = JUNK
        place.pool.asarray(np.uint8, argument.length, argument.offset)[:] = JUNK
    for pool, bytes_ in before.items():
        wrong = np.flatnonzero(pool.asarray() != bytes_)
        check(not wrong.size, f"the device wrote to {wrong.size} bytes outside of its outputs, first {wrong[:1]}")


def shared_input(target: Target) -> None:
    """Two inputs may share their bytes."""
    case = sample("add")
    twice = replace(case, feeds=(case.feeds[0], case.feeds[0]))
    with prepared(case, target) as model:
        expected = plain(model, twice, target)
        pool = Memory.create(2 * _ROOM)
        places = [ArgumentPlace(pool, 0), ArgumentPlace(pool, 0), ArgumentPlace(pool, _ROOM)]
        _check(twice, expected, places, partial(model.execute, timeout=target.patience))


def out_of_bounds(target: Target) -> None:
    """An argument that reaches beyond its pool gets INVALID_ARGUMENT on both paths."""
    case = sample("add")
    with prepared(case, target) as model, model.burst() as burst:
        (size,) = output_sizes(case)
        pool = Memory.create(_ROOM)
        asked = request(case, [ArgumentPlace(pool, 0), ArgumentPlace(pool, 64), ArgumentPlace(pool, 128)], [size])
        for offset in (_ROOM - size + 1, _ROOM, 2**31, 2**32 - 1):
            for broken in _moved(asked, offset):
                for run in (model.execute, burst.execute):
                    what = f"an argument at {offset} of a pool of {_ROOM} bytes"
                    _check_refused(partial(run, timeout=target.patience), broken, _INVALID, what)


def _moved(asked: Request, offset: int) -> Iterator[Request]:
    one, *inputs = asked.inputs
    yield asked._replace(inputs=(one._replace(offset=offset), *inputs))
    yield asked._replace(outputs=(asked.outputs[0]._replace(offset=offset),))


def freed(target: Target) -> None:
    """On the plain path, freeing freed or unknown memory is no error, and the memory can be used again."""
    case = sample("add")
    with prepared(case, target) as model:
        expected, places = plain(model, case, target), _one_pool(0, len(case.feeds) + 1)
        run = partial(model.execute, timeout=target.patience)
        for _ in range(2):
            target.device.free_memory(places[0].pool)
            _check(case, expected, places, run)
            target.device.free_memory(Memory.create(_ROOM))
