"""A descriptor from somebody else is checked on arrival: nothing is attached that could hurt later."""

import ast
import contextlib
import dataclasses
import fcntl
import os
import pickle
import random
import socket

import msgpack
import numpy as np
import pytest
from fmq_peers import new_name, open_memory

import fmq


@pytest.fixture
def queue():
    with fmq.MessageQueue.create([("seq", "u8"), ("data", "f4", (3,))], 100) as made:
        yield made


def wire(queue, **changed):
    """The queue's descriptor in wire form, with some fields changed, and a duplicate of its fd."""
    fields = ["version", "dtype", "flavour", "grantors"]
    plain, (fd,) = queue.descriptor.to_wire()
    assert not set(changed) - set(fields)
    return [changed.get(field, value) for field, value in zip(fields, plain, strict=True)], [os.dup(fd)]


def refused(descriptor, match=None):
    with pytest.raises(fmq.InvalidDescriptor, match=match):
        fmq.MessageQueue.open(descriptor)


def replaced(queue, fd, **changed):
    """The queue's own descriptor over other memory."""
    return dataclasses.replace(queue.descriptor, fds=(fd,), **changed)


def memfd(nbytes, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, content=b""):
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, content, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_the_wire_form_brings_everything_back(queue):
    """to_wire is plain data for msgpack; from_wire gives the same queue."""
    with queue.writer() as w:
        w.write(np.ones(3, queue.dtype))
    plain, fds = wire(queue)
    assert msgpack.unpackb(msgpack.packb(plain)) == plain
    opened = fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, fds))
    assert (opened.dtype, opened.capacity) == (queue.dtype, queue.capacity)
    assert opened.reader().read(3, 0)["seq"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "plain",
    [None, 1, "x", b"", [], {}, [2] * 4, [2, "'<u4'", 1], [2, "'<u4'", 1, [], "/name"], [2, "'<u4'", 1, "/name"],
     [2, b"'<u4'", 1, []], [1, "'<u4'", 1, []], [2, "'<u4'", "1", []], [2, "'<u4'", True, []], [2, "'<u4'", 1.0, []]],
    ids=repr,
)  # fmt: skip
def test_garbage_is_no_descriptor(plain):
    """Wrong types, lengths and versions, and a name (a peer may not choose which of our files we open)."""
    with pytest.raises(fmq.InvalidDescriptor, match="descriptor"):
        fmq.Descriptor.from_wire(plain, [os.dup(0)])


@pytest.mark.parametrize(
    "text",
    ["", "u4", "'|O'", "[('a', '|O')]", "'u4'", "'<u4,<u4'", "()", "('<u4',)", "[]", "{}", "1", "'<V0'", "[('a',)]",
     "__import__('os')", "'" + "x" * 5000 + "'", "(" * 1000, "\0", "\udc80", "('<f4', (2147483647, 2147483647))",
     "'<M8[9999999999999999999s]'", "'<u4' "],
    ids=lambda text: ascii(text[:20]),
)  # fmt: skip
def test_a_dtype_is_a_literal_in_its_one_spelling(queue, text):
    """Anything but what to_wire writes is refused: code, objects, other spellings, nothing, too much."""
    with pytest.raises(fmq.InvalidDescriptor):
        fmq.Descriptor.from_wire(*wire(queue, dtype=text))


def test_mutated_dtypes_are_refused_or_canonical(queue):
    """Random edits of a legal text never raise anything but InvalidDescriptor (seeded)."""
    rng = random.Random(5)
    original = queue.descriptor.to_wire()[0][1]
    alphabet = "'\"()[]{},<>|u8f4O0-9999999 abMSVU\\x\n"
    for _ in range(2000):
        text = list(original)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 3)] = rng.choices(alphabet, k=rng.randint(0, 3))
        with contextlib.suppress(fmq.InvalidDescriptor), contextlib.suppress(SyntaxWarning, DeprecationWarning):
            made = fmq.Descriptor.from_wire(*wire(queue, dtype="".join(text)))
            assert ast.literal_eval("".join(text)) is not None
            assert not made.dtype.hasobject


@pytest.mark.parametrize("capacity", [0, -1, 2**31, 2**63, 2**64, 2**1000], ids=lambda n: f"{n:.0e}")
def test_a_huge_capacity_is_refused(queue, capacity):
    """Nothing overflows, nothing is allocated: the number is wrong, or the memory is too small for it."""
    rows = [[0, 0, 4096], [0, 4096, capacity * queue.dtype.itemsize]]
    with pytest.raises(fmq.InvalidDescriptor):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(*wire(queue, grantors=rows)))


# Grantor by grantor, what libfmq checked by and by, and what it never checked. 0 is the control page, 1 the ring.
BAD_GRANTORS = {
    "none": [],
    "one": [[0, 0, 4096]],
    "nine": [[0, 0, 4096]] * 9,
    "not rows": [1, 2],
    "short rows": [[0, 0], [0, 4096]],
    "long rows": [[0, 0, 4096, 0], [0, 4096, 2000, 0]],
    "text": [[0, 0, "4096"], [0, 4096, 2000]],
    "a bool is no number": [[False, 0, 4096], [0, 4096, 2000]],
    "float": [[0, 0.0, 4096], [0, 4096, 2000]],
    "fd index out of range": [[0, 0, 4096], [5, 4096, 2000]],
    "negative fd index": [[0, 0, 4096], [-1, 4096, 2000]],
    "both fd indices out of range": [[1, 0, 4096], [1, 4096, 2000]],
    "misaligned control page": [[0, 8, 4096], [0, 4224, 2000]],
    "misaligned ring": [[0, 0, 4096], [0, 4100, 2000]],
    "negative offset": [[0, -4096, 4096], [0, 4096, 2000]],
    "negative extent": [[0, 0, 4096], [0, 4096, -2000]],
    "no extent": [[0, 0, 4096], [0, 4096, 0]],
    "control page too small": [[0, 0, 8], [0, 4096, 2000]],
    "control page too large": [[0, 0, 8192], [0, 8192, 2000]],
    "ring beyond the end": [[0, 0, 4096], [0, 4096, 4120]],
    "ring begins at the end": [[0, 0, 4096], [0, 8192, 20]],
    "offset plus extent overflows": [[0, 0, 4096], [0, 2**64 - 128, 2000]],
    "extent 0xfffff041": [[0, 0, 4096], [0, 4096, 0xFFFFF041]],
    "extent of 80 bits": [[0, 0, 4096], [0, 4096, 20 * 2**80]],
    "ring not a multiple of the element": [[0, 0, 4096], [0, 4096, 1999]],
    "overlap": [[0, 0, 4096], [0, 0, 2000]],
    "partial overlap": [[0, 0, 4096], [0, 3968, 2000]],
}


@pytest.mark.parametrize("rows", BAD_GRANTORS.values(), ids=BAD_GRANTORS)
def test_a_bad_grantor_is_refused(queue, rows):
    """Each is compared with the file descriptors that came, the memory's size as the kernel tells it, and the other."""
    with pytest.raises(fmq.InvalidDescriptor):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(*wire(queue, grantors=rows)))


def test_grantors_beyond_the_second_are_ignored(queue):
    """A later version may have more to grant."""
    plain, fds = wire(queue)
    plain[3].append([0, 8, 8])
    assert fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, fds)).capacity == queue.capacity


def test_one_memory_sent_twice_is_refused(queue):
    """Two file descriptors of the same memory could hide an overlap."""
    plain, fds = wire(queue, grantors=[[0, 0, 4096], [1, 0, 2000]])
    with pytest.raises(fmq.InvalidDescriptor, match="same memory"):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [*fds, os.dup(fds[0])]))


def test_a_ring_in_memory_of_its_own():
    """The elements may lie in a second memory, larger than needed; one that is too small, or missing, is refused."""
    control, ring = fmq.Region.create(4096), fmq.Region.create(2008)
    queue = fmq.MessageQueue.create([("a", "u8"), ("b", "u2")], 200, region=control, ring=ring)
    plain, fds = queue.descriptor.to_wire()
    opened = fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [os.dup(fd) for fd in fds]))
    with queue.writer() as w, opened.reader() as r:
        w.write(np.array([(7, 8)] * 200, queue.dtype))
        assert r.read(200)["b"].sum() == 1600
    with pytest.raises(fmq.InvalidDescriptor, match="1 file descriptors"):
        fmq.Descriptor.from_wire(plain, [os.dup(fds[0])])
    short = memfd(1992)
    with pytest.raises(fmq.InvalidDescriptor, match="only 1992"):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [os.dup(fds[0]), short]))
    with pytest.raises(ValueError, match="only 2008"):
        fmq.MessageQueue.create([("a", "u8"), ("b", "u2")], 201, region=control, ring=ring)


@pytest.mark.parametrize("flavour", [0, 4, -1, 2**40])
def test_an_unknown_flavour_is_refused(queue, flavour):
    """The flavour is part of the contract and is checked at run time."""
    with pytest.raises(fmq.InvalidDescriptor, match="flavour"):
        fmq.Descriptor.from_wire(*wire(queue, flavour=flavour))


def test_a_flavour_that_the_memory_does_not_have_is_refused(queue):
    """The descriptor's word alone does not make a queue overwrite; nor does it make one wait."""
    refused(fmq.Descriptor.from_wire(*wire(queue, flavour=2)), "flavour")


@pytest.mark.parametrize("count", [0, 2, 3])
def test_exactly_one_file_descriptor_comes_along(queue, count):
    """None, or too many, is refused."""
    plain, (fd,) = wire(queue)
    with pytest.raises(fmq.InvalidDescriptor, match=f"{count} file descriptors"):
        fmq.Descriptor.from_wire(plain, ([fd] + [os.dup(fd) for _ in range(2)])[:count])
    os.close(fd) if not count else None


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"grantors": [[0, 0, 4096], [0, 4096, 1980]]}, "capacity: the descriptor says 99, the memory holds 100"),
        ({"dtype": "'<u4'"}, "uint32"),
    ],
)
def test_memory_that_holds_another_queue_is_refused(queue, changed, said):
    """Descriptor and memory must say the same; the message says what both say."""
    refused(fmq.Descriptor.from_wire(*wire(queue, **changed)), said)


def test_only_shared_memory_is_accepted(queue):
    """A pipe, a socket, a directory, a terminal or a device is no queue."""
    ours, theirs = socket.socketpair()
    pipe = os.pipe()
    for fd in (*pipe, ours.detach(), theirs.detach(), os.open("/", os.O_RDONLY), os.open("/dev/null", os.O_RDWR)):
        refused(replaced(queue, fd))
        refused(replaced(queue, fd, sealed=False), "not of shared memory")
        os.close(fd)


def test_a_closed_descriptor_is_told_as_such(queue):
    """A number that is no file descriptor is an OSError of the kernel's, before anything is mapped."""
    with pytest.raises(OSError, match="Bad file descriptor"):
        fmq.MessageQueue.open(replaced(queue, 10**6))


def test_unsealed_memory_is_refused(queue):
    """Memory that its sender could shrink would kill us with SIGBUS later."""
    for seals in (0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE):
        fd = memfd(8192, seals)
        refused(replaced(queue, fd), "sealed")
        os.close(fd)


def test_a_file_that_is_too_small_is_refused(queue):
    """The size is compared with what the descriptor needs, after the seals were seen."""
    for nbytes in (0, 1, 4096):
        fd = memfd(nbytes)
        refused(replaced(queue, fd), f"only {nbytes}")
        os.close(fd)


def test_read_only_memory_is_refused(queue):
    """Memory that cannot be written is no queue for either role: sealed against writing, or opened read-only."""
    fd = memfd(8192, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    refused(replaced(queue, fd))
    os.close(fd)
    fd = memfd(8192)
    read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    refused(replaced(queue, read_only))
    os.close(read_only)
    os.close(fd)


def test_memory_without_a_queue_is_refused(queue):
    """Zeros, noise, and every single damaged field of a real control block."""
    nbytes = queue.descriptor.region().nbytes
    good = bytes(queue.descriptor.region().asarray())
    damaged = [good[:i] + b"\xfe" + good[i + 1 :] for i in (0, 8, 12, 16, 23, 24, 32, 1030)]
    for content in (b"", random.Random(1).randbytes(nbytes), *damaged):
        fd = memfd(nbytes, content=content)
        refused(replaced(queue, fd))
        os.close(fd)


def test_a_dtype_with_objects_in_the_memory_is_refused(name):
    """What is opened by name is checked as well: a dtype text whose hash is right may still name objects."""
    fmq.MessageQueue.create("u8", 4, name=name)
    memory = fmq.Region.open(name)
    text = b"'|O'"
    memory.asarray(np.uint8, 16, 1024)[:] = np.frombuffer(text.ljust(16, b"\0"), np.uint8)
    memory.asarray(np.uint64, 1, 24)[0] = fmq.geometry._hash(text)
    with pytest.raises(fmq.InvalidDescriptor, match="objects"):
        fmq.MessageQueue.open(name)


def test_geometry_that_changes_after_it_was_read_is_noticed(queue):
    """A peer that makes elements larger between open and the role would overflow our buffers: Corrupt instead."""
    opened = fmq.MessageQueue.open(queue.descriptor)
    memory = queue.descriptor.region()
    memory.asarray(np.uint64, 1, 16)[0] = 1
    memory.asarray(np.uint32, 1, 32)[0] = 2000
    for role in (opened.reader, opened.writer):
        with pytest.raises(fmq.Corrupt):
            role()
    memory.asarray(np.uint64, 1, 16)[0] = 100
    memory.asarray(np.uint32, 1, 32)[0] = queue.dtype.itemsize
    opened.reader().close()


def test_a_named_descriptor_carries_its_name_only(name):
    """It pickles without a file descriptor, and says so plainly when the name is gone."""
    queue = fmq.MessageQueue.create("u1", 8, name=name)
    descriptor = pickle.loads(pickle.dumps(queue.descriptor))
    assert (descriptor.name, descriptor.fds) == (name, ())
    with pytest.raises(ValueError, match="send the name"):
        descriptor.to_wire()
    assert fmq.MessageQueue.open(descriptor).capacity == 8
    fmq.unlink(name)
    with pytest.raises(FileNotFoundError, match=name):
        fmq.MessageQueue.open(descriptor)


def test_opening_an_unknown_name(name):
    """FileNotFoundError with the name; an illegal name is a ValueError."""
    with pytest.raises(FileNotFoundError, match=name):
        fmq.MessageQueue.open(name)
    for bad in ("", "/", "x", "/a/b", "/" + "x" * 300, "/a\0b"):
        with pytest.raises(ValueError, match="name="):
            fmq.MessageQueue.open(bad)


def test_opening_empty_named_memory(name):
    """A name that somebody else made and has not filled holds no queue."""
    path = "/dev/shm" + name
    for content in (b"", b"short", bytes(8192)):
        with open(path, "wb") as file:
            file.write(content)
        with pytest.raises(fmq.InvalidDescriptor):
            fmq.MessageQueue.open(name)
    assert new_name() != name


def test_received_descriptors_are_closed(queue):
    """A descriptor that came over a wire owns its file descriptor, and closes it when it goes or is refused."""
    before = open_memory()
    for _ in range(3):
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(*wire(queue))).close()
        with pytest.raises(fmq.InvalidDescriptor):
            fmq.Descriptor.from_wire(*wire(queue, grantors=[]))
        with pytest.raises(fmq.InvalidDescriptor):
            fmq.Descriptor.from_wire(None, wire(queue)[1])
    assert not open_memory() - before
