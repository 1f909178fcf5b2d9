"""libfmq against Python's fmq, against itself, and against what cannot be."""

import contextlib
import ctypes
import errno
import os
import re
import select
import signal
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_uint64, c_void_p
from pathlib import Path

import libfmq_by_ctypes
import numpy as np
import pytest
from libburst_by_ctypes import ROOT, declared_functions, exported_functions
from libfmq_by_ctypes import BROADCAST, FOREVER, UNSYNCHRONIZED, Shape, Spans
from waiting import until

import fmq

pytestmark = pytest.mark.integration
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def test_what_is_exported_is_what_the_header_declares(prefix):
    """And nothing else, in the shared library, where each has a version, and in the static one."""
    declared = declared_functions("libfmq/fmq.h", "fmq")
    assert len(declared) > 20
    versions = exported_functions(prefix / "lib/libfmq.so", "--dynamic", "--with-symbol-versions")
    assert versions == [f"{each}@@LIBFMQ_0.1" for each in declared]
    assert exported_functions(prefix / "lib/libfmq.a", "--extern-only") == declared


def test_every_function_is_documented():
    """Each says when it blocks, or belongs to one that does; the head of the file says the rest."""
    text = (ROOT / "csrc/libfmq/fmq.h").read_text()
    for comment, declarations in re.findall(r"(/\*(?:(?!\*/).)*\*/)\n((?:(?!/\*).)*)", text, re.DOTALL):
        if re.search(r"\bfmq_\w+\(", declarations):
            assert re.search(r"[Bb]lock|Wait-free|The same|[Ss]leeps|waits for", comment), declarations


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(b"<f4", 4), (b"|u1", 1), (b"<i8", 8), (b"<c16", 16), (b"|V24", 24), (b"|b1", 1), (b"|S7", 7), (None, 12)],
)
def test_python_opens_what_c_made(c, name, dtype, size):
    """By its name and by its descriptor, with the same type; what one writes the other one reads."""
    named, nameless = c.create(name, dtype, size), c.create(None, dtype, size)
    elements = np.frombuffer(os.urandom(3 * size), np.dtype((dtype or b"V12").decode()))
    if dtype == b"|b1":
        elements = np.array([True, False, True])
    fd = c.checked(c.c.fmq_queue_fd(nameless))
    for queue, opened in (
        (named, fmq.MessageQueue.open(name.decode())),
        (
            nameless,
            fmq.MessageQueue.open(fmq.Region.from_fd(fd)),
        ),
    ):
        assert (opened.dtype, opened.capacity) == (elements.dtype, 8)
        end, reader = c.writer(queue), opened.reader()
        c.checked(c.c.fmq_queue_write(end, elements.tobytes(), c_uint64(3), c_uint64(0)))
        assert reader.read(3, timeout=0).tobytes() == elements.tobytes()
        reader.close()
        c.checked(c.c.fmq_queue_leave(end))


def test_c_opens_what_python_made(c, name):
    """By its name and by its descriptor, and refuses another type."""
    for queue in (fmq.MessageQueue.create("<i8", 8, name=name.decode()), fmq.MessageQueue.create("<i8", 8)):
        with queue, queue.writer() as writer:
            fds = queue.descriptor.fds
            opens = ["fmq_queue_open_fd", fds[0]] if fds else ["fmq_queue_open", name]
            with pytest.raises(OSError, match="of another type, of 8 bytes") as failed:
                c.made(*opens, b"<f8")
            assert failed.value.errno == errno.EPROTO
            opened = c.made(*opens, b"<i8")
            shape = Shape()
            assert c.c.fmq_queue_get_shape(opened, byref(shape)) == 0
            assert (shape.capacity, shape.element_bytes, shape.flavour) == (8, 8, 1)
            end = c.reader(opened)
            writer.write(np.array([5, -6]))
            assert c.read(end, 2) == [5, -6]
            assert c.c.fmq_queue_close(opened) == c.c.fmq_queue_leave(end) == 0


@contextlib.contextmanager
def program(fmq_path, name, forks="stays"):
    """Another process that has written 1, 2, 3; its child's id, and itself."""
    command = [sys.executable, libfmq_by_ctypes.__file__, fmq_path, name.decode(), forks]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield int(running.stdout.readline()), running
        finally:
            running.kill()


def test_a_death_ends_the_wait(c, fmq_path, name):
    """A reader whose writer is killed gets what was written, then -EPIPE, and goes on with the next writer."""
    queue = c.create(name)
    reader = c.reader(queue)
    with program(fmq_path, name) as (_, running):
        assert c.read(reader, 3) == [1, 2, 3]
        assert c.c.fmq_queue_get_peer(reader) == 1
        results = []
        waiting = threading.Thread(target=lambda: results.append(c.read(reader, 1, FOREVER)))
        waiting.start()
        until(lambda: c.c.fmq_queue_available(reader) == -errno.EBUSY)
        running.send_signal(signal.SIGKILL)
        waiting.join(20)
        assert results == [-errno.EPIPE]
    assert c.c.fmq_queue_get_peer(reader) == 3
    writer = c.writer(queue)
    assert c.write(writer, 7) == 0
    assert c.read(reader) == [7]
    assert c.c.fmq_queue_leave(writer) == 0
    assert c.read(reader, 1, FOREVER) == -errno.ESHUTDOWN


def test_a_forked_child_does_not_keep_the_role(c, fmq_path, name):
    """Its parent is killed while the child lives: the role is free, and the reader was told."""
    queue = c.create(name)
    reader = c.reader(queue)
    with program(fmq_path, name, "forks") as (child, running):
        with pytest.raises(OSError, match="a writer already") as failed:
            c.writer(queue)
        assert failed.value.errno == errno.EADDRINUSE
        running.kill()
        assert running.wait() == -signal.SIGKILL
        os.kill(child, 0)  # it lives
        assert c.read(reader, 4, FOREVER) == -errno.EPIPE
        assert c.write(c.writer(queue), 9) == 0
        os.kill(child, signal.SIGKILL)


def test_a_broadcast_reaches_every_reader(c):
    """Each from where it took its seat; the writer waits for the slowest."""
    queue = c.create(capacity=2, flavour=BROADCAST)
    writer, first, second = c.writer(queue), c.reader(queue), c.reader(queue)
    assert c.write(writer, 1, 2) == 0
    assert c.read(first, 2) == [1, 2]
    assert c.write(writer, 3) == -errno.EAGAIN
    assert c.c.fmq_queue_leave(second) == 0
    assert c.write(writer, 3) == 0
    assert c.read(first) == [3]


def test_a_reader_is_overtaken(c):
    """It is told by how much, once, and goes on; or it skips to the newest."""
    queue = c.create(capacity=4, flavour=UNSYNCHRONIZED)
    writer, reader, other = c.writer(queue), c.reader(queue), c.reader(queue)
    for i in range(10):
        assert c.write(writer, i) == 0
    assert c.read(reader) == -errno.EOVERFLOW
    assert c.c.fmq_queue_lost(reader) >= 6
    assert c.c.fmq_queue_keep_latest(other, c_uint64(1)) == 0
    assert c.read(other) == [9]


def test_a_reservation_wraps(c):
    """Elements are written where they lie; meanwhile the end takes no other call."""
    queue = c.create(capacity=4)
    writer, reader = c.writer(queue), c.reader(queue)
    assert c.write(writer, 0, 0, 0) == 0
    assert c.read(reader, 3) == [0, 0, 0]
    spans = Spans()
    assert c.c.fmq_queue_reserve(writer, c_uint64(3), byref(spans), c_uint64(0)) == 0
    assert (spans.n_first, spans.n_second) == (1, 2)
    ctypes.c_int64.from_address(spans.first).value = 1
    (ctypes.c_int64 * 2).from_address(spans.second)[:] = [2, 3]
    assert c.write(writer, 4) == -errno.EBUSY
    assert c.c.fmq_queue_commit(writer, c_uint64(3)) == 0
    assert c.read(reader, 3) == [1, 2, 3]


def test_waiting_for_several(c):
    """The one that has an element is marked."""
    queues = [c.create() for _ in range(2)]
    ends = (c_void_p * 2)(*[c.reader(queue) for queue in queues])
    writers = [c.writer(queue) for queue in queues]
    ready = (ctypes.c_uint8 * 2)()
    assert c.c.fmq_queue_wait_any(ends, 2, ready, c_uint64(c.within(0.001))) == -errno.ETIMEDOUT
    assert c.write(writers[1], 1) == 0
    assert c.c.fmq_queue_wait_any(ends, 2, ready, c_uint64(FOREVER)) == 1
    assert list(ready) == [0, 1]


def test_leaving_ends_a_wait(c):
    """Of another thread, with -ECANCELED; the handle is closed from then on."""
    queue = c.create()
    reader, results = c.reader(queue), []
    waiting = threading.Thread(target=lambda: results.append(c.read(reader, 1, FOREVER)))
    waiting.start()
    until(lambda: c.c.fmq_queue_available(reader) == -errno.EBUSY)
    assert c.c.fmq_queue_leave(reader) == 0
    waiting.join(20)
    assert results == [-errno.ECANCELED]
    assert c.read(reader) == c.c.fmq_queue_leave(reader) == -errno.EBADF


NO_TYPES = [
    *((b"<f4", 8), (b"f4", 4), (b"<f3", 3), (b"|f4", 4), (b"<u1", 1), (b"", 0), (b"<f04", 4), (b"O", 8), (None, 0)),
]
NO_NAMES = [None, b"", b"/", b"no-slash", b"/a/b", b"/..", b"/" + b"x" * 300]


def test_what_cannot_be_is_an_error(c, name):
    """NULL, numbers that are no handles, handles of another kind, and arguments out of their ranges."""
    queue = c.create()
    reader, place, spans = c.reader(queue), c_void_p(), byref(Spans())
    for wrong in (None, c_void_p(1), c_void_p(2**63), queue):
        assert c.read(wrong) == c.c.fmq_queue_leave(wrong) == c.c.fmq_queue_get_peer(wrong) == -errno.EINVAL
    for wrong in (None, c_void_p(1), reader):
        assert c.c.fmq_queue_close(wrong) == c.c.fmq_queue_fd(wrong) == -errno.EINVAL
        assert c.c.fmq_queue_reader(wrong, byref(place)) == -errno.EINVAL
    for function, arguments in [
        *(("create", [None, dtype, size, c_uint64(8), 1, byref(place)]) for dtype, size in NO_TYPES),
        ("create", [None, None, 8, c_uint64(0), 1, byref(place)]),
        ("create", [None, None, 8, c_uint64(2**62), 1, byref(place)]),
        ("create", [None, None, 8, c_uint64(8), 4, byref(place)]),
        ("create", [None, None, 8, c_uint64(8), 1, None]),
        *(("open", [wrong, None, byref(place)]) for wrong in NO_NAMES),
        ("read", [reader, None, c_uint64(1), c_uint64(0)]),
        ("write", [reader, (ctypes.c_int64 * 1)(), c_uint64(1), c_uint64(0)]),
        ("reserve", [reader, c_uint64(1), None, c_uint64(0)]),
        ("commit", [reader, c_uint64(1)]),
        ("keep_latest", [reader, c_uint64(1)]),
        ("spin", [reader, c_uint64(2**40)]),
        ("wait_any", [None, 1, None, c_uint64(0)]),
    ]:  # fmt: skip
        assert getattr(c.c, f"fmq_queue_{function}")(*arguments) == -errno.EINVAL, (function, arguments)
    assert c.c.fmq_queue_reserve(reader, c_uint64(9), spans, c_uint64(0)) == -errno.EMSGSIZE
    assert c.c.fmq_queue_open(name, None, byref(place)) == c.c.fmq_queue_unlink(name) == -errno.ENOENT
    assert c.c.fmq_queue_open_fd(-1, None, byref(place)) == -errno.EBADF


def test_memory_that_is_no_queue_is_refused(c, name):
    """Without a seal, without a queue, and smaller than the queue that it says it holds; and a taken name."""
    place = c_void_p()
    made = os.memfd_create("not-sealed")
    os.truncate(made, 8192)
    assert c.c.fmq_queue_open_fd(made, None, byref(place)) == -errno.EACCES
    assert c.c.fmq_queue_open_fd(fmq.Region.create(8192).fd, None, byref(place)) == -errno.EPROTO
    c.create(name, capacity=1000)
    with pytest.raises(OSError, match="is taken") as failed:
        c.create(name)
    assert failed.value.errno == errno.EEXIST
    os.truncate(Path("/dev/shm" + name.decode()), 8192)
    assert c.c.fmq_queue_open(name, None, byref(place)) == -errno.EPROTO


THROWS = """try { fmq::queue<int>::open("/none"); assert(false); }
    catch (const fmq::error &e) { assert(e.code == -ENOENT); }"""
PROGRAM = r"""
#include <fmq.hpp>
#include <cassert>
#include <thread>
struct pose { double x, y; };
int main() {
    fmq::queue<pose> poses(2);
    auto opened = fmq::queue<pose>::open_fd(poses.fd());
    auto writer = poses.writer();
    auto reader = opened.reader();
    std::thread other([&] { for (int i = 0; i < 1000; i++) writer.write({double(i), 0}); });
    for (int i = 0; i < 1000; i++) assert(reader.read(fmq::after_ms(10000)).x == i);
    other.join();
    auto room = writer.reserve(1);
    room.first[0] = {7, 8};
    writer.commit(1);
    assert(reader.available() == 1 && reader.reserve(1).first[0].y == 8);
    reader.commit(1);
    fmq::queue<unsigned char> bytes(64, "", fmq::flavour::broadcast);
    auto sender = bytes.writer();
    auto receiver = bytes.reader();
    char word[8];
    sender.send("record", 6);
    assert(receiver.pollable() >= 0 && receiver.receive(word, 8) == 6 && receiver.position() == 22);
    assert(sender.readers().size() == 1 && sender.readers()[0].unread == 0);
    sender.evict(sender.readers()[0]);
    pose none;
    assert(reader.try_read(&none, 1, 0) == -EAGAIN && poses.capacity() == 2);
    assert(fmq::dtype_of<float>() == "<f4" && fmq::dtype_of<unsigned char>() == "|u1");
    assert(fmq::dtype_of<pose>() == "|V16");
    THROWS
    std::puts("done");
}
"""


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
@pytest.mark.parametrize("how", ["shared", "static", "without exceptions"])
def test_a_program_in_cpp(prefix, tmp_path, compiler, how):
    """With each compiler, shared and static, with and without exceptions; warnings are errors."""
    text = PROGRAM.replace("THROWS", "" if how == "without exceptions" else THROWS)
    (tmp_path / "program.cpp").write_text("#include <cerrno>\n" + text)
    environment = os.environ | {"PKG_CONFIG_PATH": f"{prefix}/lib/pkgconfig", "LD_LIBRARY_PATH": f"{prefix}/lib"}
    flags = subprocess.check_output(["pkg-config", "--cflags", "libfmq"], env=environment, text=True).split()
    link = [prefix / "lib/libfmq.a"] if how == "static" else [f"-L{prefix}/lib", "-lfmq"]
    more = ["-fno-exceptions"] if how == "without exceptions" else []
    build = [compiler, "-std=c++17", *STRICT, *more, *flags, "program.cpp", *link, "-pthread", "-o", "program"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert subprocess.check_output(["./program"], cwd=tmp_path, env=environment, text=True, timeout=60) == "done\n"


def test_the_program_on_the_page(prefix, tmp_path):
    """It reads what Python writes."""
    (text,) = re.findall(r"^```c\+\+\n(.*?)^```", (ROOT / "docs/howto/c.md").read_text(), re.DOTALL | re.MULTILINE)
    name = f"/fmq-page-{os.getpid()}"
    (tmp_path / "program.cpp").write_text(text.replace("/samples", name))
    build = ["c++", "-std=c++17", *STRICT, f"-I{prefix}/include", "program.cpp", prefix / "lib/libfmq.a", "-pthread"]
    subprocess.run(build, cwd=tmp_path, check=True)
    with fmq.MessageQueue.create("<f4", 1024, name=name) as queue, queue.writer() as writer:
        try:
            writer.write(np.array([1, 2.5, 4], "<f4"))
            assert subprocess.check_output(["./a.out"], cwd=tmp_path, text=True, timeout=60) == "1 2.5 4\n"
        finally:
            fmq.unlink(name)


class Listener(ctypes.Structure):
    _fields_ = (
        *((name, c_uint64) for name in ("position", "unread")),
        *((name, ctypes.c_uint32) for name in ("seat", "turn", "pid", "is_alive")),
    )


def test_a_writer_goes_on_without_a_reader(c):
    """It asks which reader holds it up, and evicts it; that one is told, and the other one is not touched."""
    queue = c.create(capacity=2, flavour=BROADCAST)
    writer, first, second = c.writer(queue), c.reader(queue), c.reader(queue)
    assert c.write(writer, 1, 2) == 0
    assert c.read(first, 2) == [1, 2]
    found = (Listener * 64)()
    assert c.c.fmq_queue_get_readers(writer, found, 64) == 2
    assert [(each.position, each.unread, each.pid) for each in found[:2]] == [(2, 0, os.getpid()), (0, 2, os.getpid())]
    assert c.c.fmq_queue_get_readers(writer, None, 0) == 2
    assert c.c.fmq_queue_get_readers(first, found, 64) == c.c.fmq_queue_evict(first, 0, 1) == -errno.EINVAL
    assert c.write(writer, 3) == -errno.EAGAIN
    assert c.c.fmq_queue_evict(writer, found[1].seat, found[1].turn) == 0
    assert c.write(writer, 3) == 0
    assert c.read(second) == -errno.ESTALE
    assert c.read(first) == [3]
    assert (c.c.fmq_queue_position(writer), c.c.fmq_queue_position(first)) == (3, 3)


def test_a_loop_of_poll(c):
    """The descriptor is readable once for what can be transferred, and when the peer leaves; it goes with the end."""
    queue = c.create(capacity=4)
    writer, reader = c.writer(queue), c.reader(queue)
    fd = c.checked(c.c.fmq_queue_pollable(reader, c_uint64(2)))
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert c.write(writer, 1) == 0
    assert not poll.poll(20)
    assert c.write(writer, 2) == 0
    assert poll.poll(10000)
    assert c.read(reader, 2) == [1, 2]
    assert c.c.fmq_queue_pollable(reader, c_uint64(1)) == fd
    assert not poll.poll(0)
    assert c.c.fmq_queue_pollable(reader, c_uint64(5)) == -errno.EMSGSIZE
    assert c.c.fmq_queue_leave(writer) == 0
    assert poll.poll(10000)
    assert c.c.fmq_queue_leave(reader) == 0
    assert poll.poll(0)[0][1] & select.POLLNVAL


def received(c, reader, room=10000, deadline=0):
    """A record, or -errno."""
    place = ctypes.create_string_buffer(room)
    n = c.c.fmq_queue_receive(reader, place, c_uint64(room), c_uint64(deadline))
    return n if n < 0 else place.raw[:n]


def sent(c, writer, data):
    return c.c.fmq_queue_send(writer, data, c_uint64(len(data)), c_uint64(c.within(20)))


def test_records_to_and_from_python(c, name):
    """Of any length, also longer than the queue; one that is longer than its place is skipped."""
    queue, python = c.create(name, b"|u1", 1, 256), fmq.MessageQueue.open(name.decode())
    records = [os.urandom(n) for n in (0, 1, 100, 113, 5000, 7)]
    writer = c.writer(queue)
    with python.reader() as reader, ThreadPoolExecutor() as other:
        reading = other.submit(lambda: [fmq.RecordReader(reader).receive(20) for _ in records])
        assert [sent(c, writer, record) for record in records] == [0] * len(records)
        assert reading.result() == records
    assert c.c.fmq_queue_leave(writer) == 0
    reader = c.reader(queue)
    with python.writer() as end, ThreadPoolExecutor() as other:
        writing = other.submit(lambda: [fmq.RecordWriter(end).send(record, 20) for record in records])
        assert [received(c, reader, 10000, c.within(20)) for _ in records] == records
        writing.result()
        fmq.RecordWriter(end).send(b"long" * 20)
        fmq.RecordWriter(end).send(b"short")
        assert received(c, reader, 5) == -errno.EMSGSIZE
        assert received(c, reader, 5) == b"short"
        end.write(np.frombuffer(b"no record at all, of forty bytes, or more", "u1"))
        assert received(c, reader) == -errno.EPROTO


FIRST, LAST = 1, 2


def put_part(c, writer, flags, total, data):
    """A part of a record, as a writer's program writes it."""
    part = struct.pack("=IIQ", 0x52454300 | flags, len(data), total) + data
    assert c.c.fmq_queue_write(writer, part, c_uint64(len(part)), c_uint64(0)) == 0


def test_half_a_record(c):
    """What has come stays in its place until the rest comes; meanwhile another place is refused."""
    queue = c.create(None, b"|u1", 1, 256)
    writer, reader, place = c.writer(queue), c.reader(queue), ctypes.create_string_buffer(6)
    receive = [reader, place, c_uint64(6), c_uint64(0)]
    put_part(c, writer, FIRST, 6, b"abc")
    assert c.c.fmq_queue_receive(*receive) == -errno.EAGAIN
    assert received(c, reader, 6) == -errno.EINVAL
    put_part(c, writer, LAST, 6, b"def")
    assert c.c.fmq_queue_receive(*receive) == 6
    assert place.raw == b"abcdef"


def test_parts_that_do_not_fit(c):
    """Of another record, too many bytes, and too few, are no record; an end without a beginning is passed over."""
    queue = c.create(None, b"|u1", 1, 256)
    writer, reader = c.writer(queue), c.reader(queue)
    for flags, total, data in ((LAST, 7, b"def"), (LAST, 6, b"defg"), (LAST, 6, b"de")):
        put_part(c, writer, FIRST, 6, b"abc")
        put_part(c, writer, flags, total, data)
        assert received(c, reader) == -errno.EPROTO
    put_part(c, writer, LAST, 6, b"def")
    put_part(c, writer, FIRST, 6, b"gone")
    put_part(c, writer, FIRST | LAST, 3, b"new")
    assert received(c, reader) == b"new"


def test_records_need_a_queue_of_bytes(c):
    """Other types, other flavours and too short ones are refused, and the wrong end."""
    place = ctypes.create_string_buffer(8)
    for how in (
        {},
        {"capacity": 63, "dtype": b"|u1", "size": 1},
        {"capacity": 64, "dtype": b"|u1", "size": 1, "flavour": 2},
    ):
        writer = c.writer(c.create(**how))
        assert c.c.fmq_queue_send(writer, place, c_uint64(1), c_uint64(0)) == -errno.EINVAL
    queue = c.create(None, b"|u1", 1, 64)
    assert c.c.fmq_queue_receive(c.writer(queue), place, c_uint64(8), c_uint64(0)) == -errno.EINVAL
    assert c.c.fmq_queue_send(c.reader(queue), place, c_uint64(1), c_uint64(0)) == -errno.EINVAL
