"""The rows of the table of requests: each a kind of request, and the one answer that it gets on every way in.

`request_ways` has the ways, `tests/driver/runtime/test_one_request.py` holds each way to these rows, and
`docs/one-request.md` shows them.
"""

import mmap
import os
import time
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import driver
from burst import DeviceBuffer, Memory, Request, RequestArgument
from driver import BufferRole

A = RequestArgument
X = np.array([[1, 2, 3, 4]], np.float32)


class Answer(NamedTuple):
    """What comes of a request."""

    said: str  #: a status; or what is raised for a wrong call
    outputs: tuple[Any, ...] = ()
    shapes: tuple[Any, ...] = ()  #: of outputs, where their memory was too small
    phase: str | None = None
    text: str = ""

    def __str__(self):
        parts = [self.said, *(str(part)[:60] for part in (self.outputs, self.shapes) if part), self.phase, self.text]
        return " | ".join(part for part in parts if part)


class Row(NamedTuple):
    """A kind of request."""

    kind: str
    name: str
    request: Any  #: given the site, a `Request`; None: only arrays can say it
    answer: Answer
    model: Any = None  #: a function without arguments; None: x + 1
    arrays: tuple[Any, ...] | None = None  #: the same in arrays; None: arrays cannot say it
    options: dict[str, Any] = {}  # noqa: RUF012 (nothing changes it)
    fenced: Answer | None = None  #: of a fenced execution, where the HAL has another rule
    misuse: Answer | None = None  #: of arrays that are refused before anything is sent
    priority: str = "medium"
    others: frozenset[tuple[str, str]] = frozenset()  #: status and phase of other answers that are right, too


UNKNOWN = (
    "memory of kind 'com.example.heap': this device knows ashmem, mmap_fd, hardware_buffer_blob, hardware_buffer; copy "
    "the values to Memory.create"
)


# ---- models. Each has a MUL, which one of the two devices of a divided model does not know.


def _times_one(builder, x):
    return builder.operation("MUL", x, np.ones(1, np.float32), 0)


def add(*shape):
    """x + 1."""

    def make():
        builder = driver.ModelBuilder()
        x = _times_one(builder, builder.input("float32", shape))
        builder.output(builder.operation("ADD", x, np.ones(1, np.float32), 0))
        return builder.build()

    return make


def total():
    """x + y."""
    builder = driver.ModelBuilder()
    x, y = (builder.input("float32", (1, 4)) for _ in range(2))
    builder.output(builder.operation("ADD", _times_one(builder, x), y, 0))
    return builder.build()


def concatenation(n):
    """n numbers in a row."""

    def make():
        builder = driver.ModelBuilder()
        parts = [builder.input("float32", (1,)) for _ in range(n)]
        builder.output(_times_one(builder, builder.operation("CONCATENATION", *parts, 0)))
        return builder.build()

    return make


def transposition():
    """The axes in the order that the second input says; reversed when it is omitted."""
    builder = driver.ModelBuilder()
    x = _times_one(builder, builder.input("float32", (2, 3)))
    builder.output(builder.operation("TRANSPOSE", x, builder.input("int32", (2,)), dimensions=(0, 0)))
    return builder.build()


def reshaping():
    """An output of which not even the rank is known."""
    builder = driver.ModelBuilder()
    x = _times_one(builder, builder.input("float32", (2, 3)))
    builder.output(builder.operation("RESHAPE", x, builder.input("int32", (2,)), dimensions=()))
    return builder.build()


# ---- requests


def place(*arrays, outputs):
    """The inputs in one pool, the outputs of so many bytes in another."""
    ends = np.cumsum([0, *(-(-array.nbytes // 64) * 64 for array in arrays)]).tolist()
    memory = Memory.create(ends[-1])
    for array, offset in zip(arrays, ends, strict=False):
        memory.asarray(array.dtype, array.shape, offset)[...] = array
    starts = np.cumsum([0, *(-(-length // 64) * 64 for length in outputs)]).tolist()
    inputs = tuple(A(offset=o, length=array.nbytes) for o, array in zip(ends, arrays, strict=False))
    results = tuple(A(pool=1, offset=o, length=n) for o, n in zip(starts, outputs, strict=False))
    return Request(inputs, results, (memory, Memory.create(starts[-1])))


def apart(*arrays, output):
    """A pool for each argument."""
    inputs = tuple(A(pool=n, length=array.nbytes) for n, array in enumerate(arrays))
    pools = tuple(map(filled, arrays))
    return Request(inputs, (A(pool=len(pools), length=output),), (*pools, Memory.create(output)))


def filled(array):
    memory = Memory.create(array.nbytes)
    memory.asarray(array.dtype, array.shape)[...] = array
    return memory


def usual(_=None):
    """To x + 1."""
    return place(X, outputs=[16])


def changed(request=usual, **changes):
    """The same with its fields changed: those of its input and of its output, or its own."""

    def make(site):
        found = request(site)
        inputs, outputs = (
            tuple(a._replace(**changes.get(side, {})) for a in arguments)
            for side, arguments in (("input", found.inputs), ("output", found.outputs))
        )
        whole = {name: value(found) for name, value in changes.items() if name not in ("input", "output")}
        return found._replace(**({"inputs": inputs, "outputs": outputs} | whole))

    return make


# ---- answers


def ok(*outputs):
    return Answer("NONE", tuple(map(plain, outputs)))


def plain(output):
    """An output as it is compared: a large one by its sum."""
    return output.tolist() if output.size < 1000 else float(output.sum())


def invalid(text):
    return Answer("INVALID_ARGUMENT", text=text)


def misuse(text, kind="ValueError"):
    return Answer(kind, text=text)


def too_small(*shape):
    text = f"output 0 needs dimensions {list(shape)}: bind a larger buffer"
    return Answer("OUTPUT_INSUFFICIENT_SIZE", shapes=((shape, False),), text=text)


# ---- rows


def rows():
    """All of them."""
    return [*sizes(), *pools(), *omitted(), *buffers(), *shapes(), *malformed(), *times(), *others()]


def sizes():
    kind, one, large = "sizes", np.array([5], np.float32), np.ones(1 << 20, np.float32)
    yield Row(kind, "usual sizes", usual, ok(X + 1), arrays=(X,))
    yield Row(kind, "one element", lambda _: place(one, outputs=[4]), ok(one + 1), add(1), (one,))
    nbytes = large.nbytes
    yield Row(kind, "4 MB", lambda _: place(large, outputs=[nbytes]), ok(large + 1), add(1 << 20), (large,))


def pools():
    def with_offsets(_):
        pool = Memory.create(3 * 4096)
        pool.asarray("f4", (1, 4), 4100)[...] = X
        return Request((A(offset=4100, length=16),), (A(offset=8196, length=16),), (pool,))

    def with_spare(_):
        request = usual()
        return request._replace(pools=(*request.pools, Memory.create(64)))

    def with_foreign(request, n):
        fd = os.memfd_create("heap")
        os.ftruncate(fd, mmap.PAGESIZE)
        pools = list(request.pools)
        pools[n] = Memory.from_handle(fd, mmap.PAGESIZE, "com.example.heap", fields=(1,))
        os.close(fd)
        return tuple(pools)

    kind = "pools"
    yield Row(kind, "a pool for each argument", lambda _: apart(X, X, output=16), ok(X + X), total)
    yield Row(kind, "one pool, at any offset", with_offsets, ok(X + 1))
    yield Row(kind, "a pool that no argument uses", with_spare, ok(X + 1))
    for side in ("input", "output"):
        make, answer = changed(pools=partial(with_foreign, n=side == "output")), Answer("GENERAL_FAILURE", text=UNKNOWN)
        yield Row(kind, f"an {side} in memory of a kind that the device does not know", make, answer)
    for n in (72, 299):
        parts = [np.array([k], np.float32) for k in range(n)]
        make = lambda _, parts=parts: apart(*parts, output=4 * len(parts))  # noqa: E731
        yield Row(kind, f"{n + 1} pools", make, ok(np.arange(n, dtype="f4")), concatenation(n))


def omitted():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    request = changed(
        lambda _: place(x, outputs=[24]),
        inputs=lambda r: (*r.inputs, A(has_no_value=True)),
        output={"dimensions": (3, 2)},
    )
    yield Row("omitted inputs", "an input that may be omitted", request, ok(x.T), transposition, (x, None))
    needed = Answer("GENERAL_FAILURE", text="operation 0 (MUL): operand 0 is omitted but needed")
    without = changed(inputs=lambda _: (A(has_no_value=True),))
    yield Row("omitted inputs", "an input that is needed", without, needed, arrays=(None,))


def buffers():
    roles, kind = ([BufferRole(0, 0)], [BufferRole(0, 0)]), "buffers"

    def read(buffer):
        return Request((A(pool=1),), (A(length=16),), (Memory.create(16), buffer))

    def valued(site):
        buffer = site.allocate(*roles)
        buffer.copy_from(X)
        return read(buffer)

    def closed(site):
        request = valued(site)
        request.pools[1].close()
        return request

    def written(site):
        return Request((A(length=16),), (A(pool=1),), (filled(X), site.allocate(*roles)))

    def part(site):
        request = valued(site)
        return request._replace(inputs=(A(pool=1, offset=4, length=8),))

    words = "buffer N has no value: nothing was written to it, or the last write failed"
    other = "buffer N belongs to a device that died, or to another connection; allocate it there"
    whole = "input 0: 8 bytes at offset 4 of a buffer; buffers are used whole: give offset 0 and length 0"
    yield Row(kind, "a buffer as input", valued, ok(X + 1))
    yield Row(kind, "a buffer as output", written, Answer("NONE", (None,)))
    fresh = Answer("GENERAL_FAILURE", text=words)
    yield Row(kind, "a fresh buffer as input", lambda site: read(site.allocate(*roles)), fresh)
    yield Row(kind, "part of a buffer", part, invalid(whole))
    elsewhere = lambda site: read(site.allocate_elsewhere(*roles))  # noqa: E731
    yield Row("buffers of a device", "a buffer of another connection", elsewhere, misuse(other, "BuffersLost"))
    yield Row(kind, "a closed buffer", closed, misuse("buffer N is closed; allocate another"))
    unknown = lambda _: read(DeviceBuffer(99999))  # noqa: E731
    no_buffer = invalid("token N: no buffer of this client; it may have been released")
    yield Row("buffers of a device", "a buffer that was never allocated", unknown, no_buffer)


def shapes():
    x, kind, model = np.arange(8, dtype=np.float32).reshape(2, 4), "open shapes", add(0, 4)

    def opened(given, out=(), length=32):
        return changed(lambda _: place(x, outputs=[length]), input={"dimensions": given}, output={"dimensions": out})

    def unsaid(dimensions):
        return invalid(f"output 0: dimensions {list(dimensions)} are not fully known; a fenced request must give them")

    large = np.zeros((100_000, 4), np.float32)
    yield Row(kind, "an output that is larger than its first guess", None, ok(large + 1), model, (large,))
    few = invalid("output 0: 16 bytes are too few for TENSOR_FLOAT32 [2, 4]")
    yield Row(kind, "an open input with its dimensions", opened((2, 4)), ok(x + 1), model, (x,), fenced=unsaid((0, 4)))
    yield Row(kind, "the same, with the output's", opened((2, 4), (2, 4)), ok(x + 1), model)
    unknown = invalid("input 0: dimensions (0, 4) are not fully known; give them in the request")
    yield Row(kind, "an open input without dimensions", opened(()), unknown, model)
    short = opened((2, 4), (), 16)
    yield Row(kind, "an open output in too little memory", short, too_small(2, 4), model, fenced=unsaid((0, 4)))
    short = opened((2, 4), (2, 4), 16)
    yield Row(kind, "the same, with its dimensions", short, too_small(2, 4), model, fenced=few)

    six, shape = np.arange(6, dtype="f4"), np.array([3, 2], "i4")
    given = six.reshape(2, 3), shape

    def reshaped(out):
        return changed(lambda _: place(*given, outputs=[24]), output={"dimensions": out})

    good = ok(six.reshape(3, 2))
    yield Row(kind, "an output of unknown rank", reshaped(()), good, reshaping, given, fenced=unsaid(()))
    yield Row(kind, "the same, with its dimensions", reshaped((3, 2)), good, reshaping)
    short = changed(lambda _: place(*given, outputs=[8]))
    yield Row(kind, "the same, in too little memory", short, too_small(3, 2), reshaping, fenced=unsaid(()))
    wrong = Answer("GENERAL_FAILURE", text="output 0: the request gives dimensions [2, 3], but its shape is [3, 2]")
    yield Row(kind, "the same, with others", reshaped((2, 3)), wrong, reshaping)


def malformed():
    def read_only(_):
        fd = os.memfd_create("table")
        os.ftruncate(fd, mmap.PAGESIZE)
        pool = Memory.from_fd(fd, mmap.PAGESIZE, mmap.PROT_READ)
        os.close(fd)
        return changed(pools=lambda r: (r.pools[0], pool))(None)

    def closed(_):
        request = usual()
        request.pools[0].close()
        return request

    nothing = (A(has_no_value=True),)
    limit = "10000 pools in one request; at most 1024 are allowed: put several arguments into one pool"
    place_of_none = "input 0 is omitted, so it has no pool, offset, length or dimensions: leave them out"
    no_such_pool = "output 0: there is no pool 7; the request has 2"
    other_rank = "output 0: dimensions [4] differ in rank from the model's [1, 4]"
    contradiction = "output 0: dimensions [2, 2] contradict the model's [1, 4]"
    no_pool = "pool 0 is 1; a pool is a burst.Memory, or a buffer that a device allocated"
    wrong_places = [
        ("an input in a pool that is not there", {"pool": 2}, "there is no pool 2; the request has 2"),
        ("a negative pool", {"pool": -1}, "there is no pool -1; the request has 2"),
        ("an input beyond its pool", {"offset": 4096}, "16 bytes at 4096 exceed the pool's 64"),
        ("an input far beyond its pool", {"offset": 2**32 - 1}, f"16 bytes at {2**32 - 1} exceed the pool's 64"),
        ("an input longer than its pool", {"length": 65}, "65 bytes at 0 exceed the pool's 64"),
        ("an offset of 2^40", {"offset": 1 << 40}, f"offset {1 << 40} is not from 0 to 4294967295 bytes"),
        ("a negative length", {"length": -4}, "length -4 is not from 0 to 4294967295 bytes"),
        ("an input that is too short", {"length": 12}, "12 bytes are too few for TENSOR_FLOAT32 [1, 4]"),
        ("a negative dimension", {"dimensions": (-1, 4)}, "dimensions [-1, 4] are not all from 0 to 4294967295"),
    ]
    table = [
        *((name, changed(input=change), f"input 0: {text}") for name, change, text in wrong_places),
        ("an omitted input with a place", changed(input={"has_no_value": True}), place_of_none),
        ("an output in a pool that is not there", changed(output={"pool": 7}), no_such_pool),
        ("an output beyond its pool", changed(output={"offset": 64}), "output 0: 16 bytes at 64 exceed the pool's 64"),
        ("other dimensions of an output", changed(output={"dimensions": (2, 2)}), contradiction),
        ("another rank of an output", changed(output={"dimensions": (4,)}), other_rank),
        ("an omitted output", changed(outputs=lambda _: nothing), "output 0: only inputs may be omitted"),
        ("an output in a read-only pool", read_only, "output 0: pool 1 is read-only; put outputs into a writable pool"),
        ("no inputs", changed(inputs=lambda _: ()), "0 inputs; the model has 1"),
        ("no outputs", changed(outputs=lambda _: ()), "0 outputs; the model has 1"),
        ("too many outputs", changed(outputs=lambda r: 2 * r.outputs), "2 outputs; the model has 1"),
        ("10,000 pools", changed(pools=lambda r: r.pools + 9998 * r.pools[:1]), limit),
    ]
    kind = "malformed"
    for name, request, text in table:
        yield Row(kind, name, request, invalid(text))
    count = misuse("2 inputs were given; the model takes 1: input_0")
    two = changed(inputs=lambda r: 2 * r.inputs)
    yield Row(kind, "too many inputs", two, invalid("2 inputs; the model has 1"), arrays=(X, X), misuse=count)
    for name, shape, words in (
        ("another rank", (4,), "differ in rank from"),
        ("other dimensions", (2, 2), "contradict"),
    ):
        text, x = f"input 0: dimensions {list(shape)} {words} the model's [1, 4]", X.reshape(shape)
        refused = misuse(f"input 0 has shape {shape}; the model takes (1, 4)")
        yield Row(kind, name, changed(input={"dimensions": shape}), invalid(text), arrays=(x,), misuse=refused)
    dtype = misuse("input 0 has dtype float64; the model takes float32: convert it with .astype('float32')")
    yield Row(kind, "another dtype", None, dtype, arrays=(X.astype("f8"),), misuse=dtype)
    few = invalid("output 0: 12 bytes are too few for TENSOR_FLOAT32 [1, 4]")
    yield Row(kind, "an output that is too short", changed(output={"length": 12}), too_small(1, 4), fenced=few)
    yield Row(kind, "a closed pool", closed, misuse("pool 0 is closed; a pool stays open while requests use it"))
    yield Row(kind, "no pool", changed(pools=lambda _: (1, 2)), misuse(no_pool, "TypeError"))


def slow():
    """Some milliseconds of matrix products."""
    builder = driver.ModelBuilder()
    x = _times_one(builder, builder.input("float32", (64, 512)))
    weights, bias = (builder.constant(np.zeros(shape, np.float32)) for shape in ((512, 512), (512,)))
    for _ in range(24):
        x = builder.operation("FULLY_CONNECTED", x, weights, bias, 0)
    builder.output(x)
    return builder.build()


def counting():
    """Adds 1 to the first input until it has reached the second."""

    def graph(operation, *more):
        builder = driver.ModelBuilder()
        n, most = builder.input("float32", (1,)), builder.input("float32", (1,))
        given = (n, most) if operation == "LESS" else (n, np.ones(1, np.float32), 0)
        found = [builder.operation(operation, *given)]
        found += [builder.operation("ADD", most, np.zeros(1, np.float32), 0) for _ in more]
        builder.output(*found)
        return builder.build()

    builder = driver.ModelBuilder()
    n, most = builder.input("float32", (1,)), builder.input("float32", (1,))
    more = _times_one(builder, n)
    n, _ = builder.operation("WHILE", graph("LESS"), graph("ADD", most), more, most)
    builder.output(n)
    return builder.build()


def times():
    good, kind, nan = ok(X + 1), "times", float("nan")

    def late(seconds):
        return lambda: time.monotonic() + seconds

    def row(name, answer, **options):
        return Row(kind, name, usual, answer, arrays=(X,), options=options)

    def hopeless(late=""):
        words = f"MISSED_DEADLINE_PERSISTENT (before start){late}; give it more time, or another device"
        return Answer("MISSED_DEADLINE_PERSISTENT", phase="before start", text=words)

    def wrong(name, what):
        return misuse(f"{name}: {what}, 0 or more; leave it out, or give None, for no limit")

    past = hopeless(", late by N ms")
    yield row("a deadline that is far", good, deadline=late(3600))
    yield row("a deadline at the end of time", good, deadline=lambda: float("inf"))
    yield row("a deadline later than clocks reach", good, deadline=lambda: 1e300)
    yield row("a deadline that has passed", past, deadline=late(-1))
    yield row("a deadline before time began", wrong("deadline=-1.0", "a time.monotonic()"), deadline=lambda: -1.0)
    yield row("a deadline in words", wrong("deadline='soon'", "a time.monotonic()"), deadline=lambda: "soon")
    yield row("a deadline that is no number", wrong("deadline=nan", "a time.monotonic()"), deadline=lambda: nan)
    yield row("a timeout that is long", good, timeout=lambda: 3600.0)
    yield row("an endless timeout", good, timeout=lambda: float("inf"))
    words = "timeout=0: no result can come in that time, and nothing was sent"
    yield row("a timeout of 0", Answer("Timeout", phase="before start", text=words), timeout=lambda: 0)
    yield row("a timeout longer than clocks reach", good, timeout=lambda: 1e300)
    yield row("a timeout in words", wrong("timeout='soon'", "seconds"), timeout=lambda: "soon")
    yield row("a negative timeout", wrong("timeout=-1.0", "seconds"), timeout=lambda: -1.0)
    yield row("a timeout that is no number", wrong("timeout=nan", "seconds"), timeout=lambda: nan)
    work = np.zeros((64, 512), np.float32)
    short = partial(Row, kind, request=lambda _: place(work, outputs=[work.nbytes]), model=slow, arrays=(work,))
    waiting, transient = "waiting for the answer", "MISSED_DEADLINE_TRANSIENT"
    given_up = {("MISSED_DEADLINE_PERSISTENT", "executing"), (transient, "executing"), (transient, "before start")}
    given_up |= {(transient, "queued")}
    others = frozenset({*given_up, (transient, waiting)})
    yield short("a deadline that is too short", answer=hopeless(), options={"deadline": late(1e-3)}, others=others)
    others = frozenset({*given_up, ("Timeout", waiting), ("Timeout", "executing"), ("Timeout", None)})
    yield short("a timeout that is too short", answer=hopeless(), options={"timeout": lambda: 1e-3}, others=others)

    n, three, many = (np.full(1, value, np.float32) for value in (0, 3, 1e9))
    endless = lambda _: place(n, many, outputs=[4])  # noqa: E731
    words = "a WHILE took longer than its loop timeout of 0.001 s; try again, or give it more time"
    looped = Answer("MISSED_DEADLINE_TRANSIENT", phase="executing", text=words)
    yield Row(kind, "a WHILE that takes too long", endless, looped, counting, options={"loop_timeout": lambda: 1e-3})
    in_time = lambda _: place(n, three, outputs=[4])  # noqa: E731
    yield Row(kind, "a WHILE in time", in_time, ok(three), counting, (n, three))
    yield Row(kind, "a WHILE in time, limited", in_time, ok(three), counting, options={"loop_timeout": lambda: 2.0})
    endless = {"loop_timeout": lambda: float("inf")}
    yield Row(kind, "an endless loop timeout", in_time, ok(three), counting, options=endless)
    negative = wrong("loop_timeout=-1.0", "seconds")
    yield Row(kind, "a negative loop timeout", usual, negative, options={"loop_timeout": lambda: -1.0})


def others():
    good = ok(X + 1)
    numbers = np.int64(0), np.uint32(16), tuple(np.array([1, 4]))
    numpy_numbers = changed(input=dict(zip(("offset", "length", "dimensions"), numbers, strict=True)))
    yield Row("numbers", "numbers of numpy", numpy_numbers, good)
    for priority in ("low", "medium", "high"):
        yield Row("priorities", f"{priority} priority", usual, good, arrays=(X,), priority=priority)
    yield Row("measuring", "measured", usual, good, options={"measure": lambda: True})
    refused, words = changed(inputs=lambda _: ()), "0 inputs; the model has 1"
    yield Row("measuring", "measured, and refused", refused, invalid(words), options={"measure": lambda: True})
