"""Models that break a rule: refused where they break it, before the rest of them is read."""

import fcntl
import itertools
import mmap
import os
import random
import zlib

import msgpack
import numpy as np
import pytest
from sent_models import sent

import driver
from driver.nn import InvalidModel, OperandLifeTime, OperandType, validate
from driver.protocol.model_codec import decode, decode_valid, encode, sealed

ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MANY = 100_000
FLOAT, INT = int(OperandType.TENSOR_FLOAT32), int(OperandType.INT32)
INPUT, OUTPUT, CONSTANT, SUBGRAPH = (
    int(OperandLifeTime[name]) for name in ("SUBGRAPH_INPUT", "SUBGRAPH_OUTPUT", "CONSTANT_COPY", "SUBGRAPH")
)


def operand(life=INPUT, code=FLOAT, dims=(2,), scale=0.0, value=None, quant=None, uses=None):
    return [code, dims, scale, 0, life, value, quant, uses]


def arrived(objects, constants=bytes(64)):
    """The memory of a model with this structure, and where that lies."""
    raw = b"".join(one if isinstance(one, bytes) else msgpack.packb(one) for one in objects)
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    with open(fd, "wb", closefd=False) as file:
        file.write(constants + raw)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL)
    where = [len(constants), len(raw)]
    return sealed([fd], where), where


ADD = [operand(), operand(CONSTANT, value=[0, 8]), operand(CONSTANT, INT, (), value=[0, 4]), operand(OUTPUT)]


def many(*first, n_operands=4, inputs=(0,), outputs=(3,), n_operations=MANY, rest=(["ADD", [0, 1, 2], [3]],)):
    """A structure that says many operations, of which all are there."""
    header = [n_operands, n_operations, inputs, outputs]
    return [[1, False, 1], header, *first, *itertools.islice(itertools.cycle(rest), n_operations)]


def nested(count):
    """A list of lists of lists, `count` bytes long, none of them with many elements."""
    one = msgpack.packb([[7] * 2**15] * (count >> 15))
    return b"\x98" + msgpack.packb(FLOAT) + msgpack.packb([2]) + b"\x00\x00\x01" + one + b"\xc0\xc0"


LONG = b"\xdd" + (31 * 2**20).to_bytes(4, "big") + b"\x01" * (31 * 2**20)
FAULTS = {
    "dimensions without end": ([b"\x98\x03" + LONG + b"\x00\x00\x01\xc0\xc0\xc0"], {}, "max_array_len"),
    "rank": ([operand(dims=[1] * 33)], {}, "rank 33; at most 32"),
    "rank, with a product of millions of digits": ([operand(CONSTANT, dims=[2**63] * 2**18, value=[0, 8])], {}, "rank"),
    "nested": ([nested(8 << 20)], {}, "more than 4194304 bytes"),
    "type": ([operand(code=99)], {}, "operand 0: 99 is no operand type"),
    "lifetime": ([operand(life=99)], {}, "operand 0: 99 is no operand lifetime"),
    "dimension": ([operand(dims=[-1])], {}, r"operand 0 \(TENSOR_FLOAT32\): dimensions"),
    "scale": ([operand(scale=1.0)], {}, "scale 1.0 has to be 0"),
    "a constant outside": ([operand(CONSTANT, value=[0, 2**40])], {}, "outside the model"),
    "subgraph": ([operand(SUBGRAPH, int(OperandType.SUBGRAPH), (), value=5)], {}, "subgraph 5 is not one of the 0"),
    "text for a number": ([operand(value="7" * 500)], {}, "has to be a number|must be a number"),
    "a long text": ([operand(value="7" * 600)], {}, "max_str_len"),
    "an input that does not exist": (ADD, {"inputs": [9]}, "input operand 9 does not exist"),
    "an input twice": (ADD, {"inputs": [0, 0]}, "operand 0 is listed twice"),
    "an output that is none": (ADD, {"outputs": [1]}, "output operand 1 has lifetime CONSTANT_COPY"),
    "operation": ([*ADD, ["NO_SUCH", [0], [3]]], {}, "no such operation"),
    "operand of an operation": ([*ADD, ["ADD", [0, 1, 7], [3]]], {}, "operand 7 does not exist"),
    "types of an operation": ([*ADD, ["ADD", [0, 1, 1], [3]]], {}, "operation 0 .ADD.: input 2 has type"),
    "written twice": (ADD, {}, "operand 3 is written a second time"),
    "counts": ([], {"n_operands": 2**18 + 1}, "262145 operands"),
    "no operation": ([], {"n_operations": 0}, "at least one operand and one operation"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_model_is_refused_at_its_first_fault(name):
    """A hundred thousand operations follow: none of them is read."""
    first, terms, reason = FAULTS[name]
    memory, where = arrived(many(*first, **terms) if name != "dimensions without end" else many(*first, n_operations=1))
    read = []
    with pytest.raises(InvalidModel, match=reason):
        decode_valid(memory, where, lambda: read.append(None))
    assert len(read) <= 8


@pytest.mark.integration
def test_all_subgraphs_together_have_a_bound():
    """Counts are of the whole model, whatever it is divided into."""
    graph = [[2**17, 0, [], []], *(operand(code=INT, dims=(), life=5) for _ in range(2**17))]
    memory, where = arrived([[1, False, 4], *many(*ADD, n_operations=1)[1:], *graph, *graph, *graph])
    with pytest.raises(InvalidModel, match="131072 operands and 0 operations; at most 262144 are allowed in all"):
        decode(memory, where)


@pytest.mark.integration
def test_branches_are_compared_by_their_numbers_first():
    """A thousand IFs of three inputs each, whose branches have many: the branches' lists are not read for each."""
    branch = [[MANY, 0, range(MANY), []], *(operand() for _ in range(MANY))]
    bool8, graph = int(OperandType.TENSOR_BOOL8), int(OperandType.SUBGRAPH)
    operands = [operand(code=bool8, dims=(1,)), operand(SUBGRAPH, graph, (), value=0), operand(OUTPUT)]
    one = [[1, False, 2], [3, 1, [0], [2]], *operands, ["IF", [0, 1, 1], [2]]]
    branch[0][2] = list(branch[0][2])
    memory, where = arrived([*one, *branch])
    with pytest.raises(InvalidModel, match="the then branch has 100000 inputs; it has to have 0"):
        decode_valid(memory, where)


def test_what_paces_it_may_end_it():
    """`pace` is called before each operand and operation; what it raises is what the caller gets."""
    memory, where = arrived(many(*ADD, n_operations=1))
    seen = []

    def pace():
        seen.append(None)
        if len(seen) == 5:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        decode_valid(memory, where, pace)


def outcome(function, *arguments):
    try:
        function(*arguments)
    except InvalidModel:
        return "refused"
    return "valid"


def mutants(structure, count, seed):
    """The structure with some objects changed, dropped or exchanged."""
    rng = random.Random(seed)
    unpacker = msgpack.Unpacker()
    unpacker.feed(structure)
    objects = list(unpacker)
    numbers = (-1, 0, 1, 2, 3, 4, 5, 6, 15, 33, 2**18 + 1, 2**40, None, "ADD", "", [], [1], [0, 8], 0.5, True)
    for _ in range(count):
        changed = [list(one) if isinstance(one, list) else one for one in objects]
        for _ in range(rng.choice((1, 1, 1, 2))):
            place = rng.choice(changed[1:])
            at = rng.randrange(len(place))
            place[at] = rng.choice(numbers)
        if rng.random() < 0.1:
            del changed[rng.randrange(1, len(changed))]
        yield changed


@pytest.mark.parametrize("name", ["add_model", "conv_model", "quantised_model", "reshape_model", "open_model"])
def test_it_refuses_what_decoding_and_validating_would(kit, name):
    """Of a thousand mutants of each model: the same ones as `validate`, after all was read."""
    model = getattr(kit, name)()
    encoded = encode(model)
    offset, size = encoded.where
    constants, structure = os.pread(encoded.fd, offset, 0), os.pread(encoded.fd, size, offset)
    assert outcome(decode_valid, *arrived([structure], constants)) == "valid"
    found = set()
    for changed in mutants(structure, 1000, zlib.crc32(name.encode())):
        memory, where = arrived(changed, constants)
        expected = outcome(lambda memory=memory, where=where: validate(decode(memory, where)))
        assert outcome(decode_valid, memory, where) == expected, changed
        found.add(expected)
    assert found == {"refused", "valid"}


def sparse(nbytes, written=b""):
    """Sealed memory of which only the beginning exists."""
    fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, written, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL)
    return fd


class TestHoles:
    """Pages of a model that do not exist would become the device's when it reads them."""

    def test_a_sparse_model_is_refused(self):
        """None of its pages is made: the kernel's count of its blocks stays what it was."""
        fd = sparse(1 << 30, msgpack.packb([1, False, 1]))
        before = os.fstat(fd).st_blocks
        with pytest.raises(InvalidModel, match="the model's memory has holes"):
            sealed([os.dup(fd)], [0, 10])
        assert os.fstat(fd).st_blocks == before
        os.close(fd)

    def test_blocks_behind_the_end_hide_no_hole(self):
        """Memory may have more blocks than its size needs, and a hole all the same."""
        fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
        os.posix_fallocate(fd, 1 << 20, 1 << 20)
        os.ftruncate(fd, 1 << 20)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL)
        with pytest.raises(InvalidModel, match="holes"):
            sealed([fd], [0, 10])

    def test_a_sparse_pool_is_refused(self):
        """Of a handle the part counts that the model uses."""
        pool = driver.Memory.frozen(np.ones(2**16, np.float32))
        builder = driver.ModelBuilder()
        x = builder.input("float32", (2**16,))
        builder.output(builder.operation("ADD", x, builder.constant(pool.asarray(np.float32), by_reference=True), 0))
        fds, where = sent(builder.build())
        for nbytes, refused in ((2**18, True), (2**20, False)):
            fd = sparse(2**20, bytes(2**17 if refused else 2**18))
            given = [*where[:2], [["ashmem", 0, 2**18]]]
            if refused:
                with pytest.raises(InvalidModel, match="pool of kind 'ashmem' has holes"):
                    sealed([os.dup(fds[0]), fd], given)
            else:
                assert sealed([os.dup(fds[0]), fd], given).nbytes > 2**18, nbytes
        for fd in fds:
            os.close(fd)

    @pytest.mark.parametrize("written", [5, 2])
    def test_a_client_makes_the_pages_that_its_constants_lack(self, written):
        """A pool that lacks pages gets those of its constants, and the others if half of it is there: then it travels
        as a handle, now and later. Else the constants are copied, now and later.
        """
        fd = os.memfd_create("sparse", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 8 * 4096)
        os.pwrite(fd, bytes(written * 4096), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, ALL)
        readable = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        pool = driver.Memory.from_fd(readable, 8 * 4096, mmap.PROT_READ)
        for offset in (0, 7 * 4096, 0):
            builder = driver.ModelBuilder()
            x = builder.input("float32", (4,))
            constant = builder.constant(pool.asarray(np.float32, 4, offset), by_reference=True)
            builder.output(builder.operation("ADD", x, constant, 0))
            fds, where = sent(builder.build())
            assert len(fds) == (2 if written == 5 else 1)
            assert decode_valid(sealed(fds, where), where).main.operations[0].type == "ADD"
        assert os.fstat(fd).st_blocks * 512 == 4096 * (8 if written == 5 else 3)
        os.close(fd), os.close(readable)
