"""Models on their way to a device: refused before they travel, read by nobody who trusts them, kept apart."""

import contextlib
import fcntl
import os
import random
import threading

import msgpack
import numpy as np
import pytest
from sent_models import arrived, sent

import driver
from burst import Request
from driver import Operand, Operation, Subgraph
from driver.client.remote_executor import RemoteExecutor
from driver.devices.reference import ReferenceDevice, ReferenceModel
from driver.engine.cache.compilations import Declined
from driver.engine.models import ModelStore, SharedModel
from driver.protocol.model_codec import decode, encode, sealed

F_SEAL_FUTURE_WRITE = 0x10
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
X = np.ones((1, 4), np.float32)


def send(device, method, data, where, seals=SEALS):
    """What a hostile client sends as a model."""
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return device.call(method, where, fds=[fd])
    finally:
        os.close(fd)


def encoded(model):
    """The bytes of a model, and where its structure lies."""
    found = encode(model)
    return os.pread(found.fd, 2**20, 0), found.where


def objects(data, where):
    unpacker = msgpack.Unpacker(use_list=True)
    unpacker.feed(data[where[0] : where[0] + where[1]])
    return list(unpacker)


def rebuilt(data, where, structure):
    """The same constants with another structure."""
    raw = b"".join(msgpack.packb(o) for o in structure)
    return data[: where[0]] + raw, [where[0], len(raw)]


def refused(device, data, where, **more):
    """The device refuses it as an invalid argument, twice, and says why."""
    with pytest.raises(driver.InvalidArgument) as caught:
        send(device, "prepare", data, where, **more)
    with pytest.raises(driver.InvalidArgument):
        send(device, "supported", data, where, **more)
    assert str(caught.value) not in ("", "INVALID_ARGUMENT")
    return str(caught.value)


def test_supported_operations(device, connect, kit):
    """A device says of each operation whether it supports it."""
    assert device.supported_operations(kit.conv_model()) == [True] * 3
    picky = connect("Picky")
    assert picky.supported_operations(kit.mul_model()) == [False]
    assert picky.supported_operations(kit.add_model()) == [True]


@pytest.mark.integration
def test_supported_operations_of_a_very_long_model(device):
    """The answer has room for every operation that a model may have."""
    n = 66_000
    operands = [Operand("TENSOR_FLOAT32", (1,), lifetime="INPUT")]
    operands += [Operand("TENSOR_FLOAT32", (1,)) for _ in range(n - 1)]
    operands += [Operand("TENSOR_FLOAT32", (1,), lifetime="OUTPUT")]
    operations = [Operation("RELU", (i,), (i + 1,)) for i in range(n)]
    model = driver.Model(Subgraph(operands, operations, (0,), (n,)))
    assert device.supported_operations(model) == [True] * n


def test_unsupported_operation_is_named(connect, kit):
    """A model with an operation that the device does not support is refused with its index and name."""
    with pytest.raises(driver.InvalidArgument, match=r"0.*MUL"):
        connect("Picky").prepare(kit.mul_model())


def test_invalid_model_is_not_sent(device, monkeypatch):
    """An invalid model is refused in the client, with the operand or the operation, and nothing is sent."""
    good = Operand("TENSOR_FLOAT32", (4,), lifetime="INPUT")
    out = Operand("TENSOR_FLOAT32", (4,), lifetime="OUTPUT")
    relu = Operation("RELU", (0,), (1,))
    bad_operand = Subgraph([Operand("TENSOR_FLOAT32", (4,), scale=1.0, lifetime="INPUT"), out], [relu], (0,), (1,))
    bad_operation = Subgraph([good, out], [Operation("RELU", (0,), (7,))], (0,), (1,))
    monkeypatch.setattr(device, "call", None)
    for graph, match in ((bad_operand, "operand 0.*scale"), (bad_operation, r"operation 0 \(RELU\).*operand 7")):
        for method in (device.prepare, device.supported_operations):
            with pytest.raises(driver.InvalidModel, match=match):
                method(driver.Model(graph))


def same(left, right):
    """Two models are equal in all that a device gets to see."""
    assert (left.relaxed, len(left.referenced)) == (right.relaxed, len(right.referenced))
    for a, b in zip((left.main, *left.referenced), (right.main, *right.referenced), strict=True):
        assert (a.operations, a.inputs, a.outputs) == (b.operations, b.inputs, b.outputs)
        assert len(a.operands) == len(b.operands)
        for one, other in zip(a.operands, b.operands, strict=True):
            same_operand(one, other)


def same_operand(a, b):
    for name in ("type", "dimensions", "scale", "zero_point", "lifetime", "channel_quant", "number_of_consumers"):
        assert getattr(a, name) == getattr(b, name)
    if a.lifetime.is_constant:
        assert np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes()
    else:
        assert a.value == b.value


def branching_model():
    """Two referenced subgraphs, one of which refers to the other; nothing here can run it."""
    branch = Subgraph(
        [Operand("TENSOR_FLOAT32", (2,), lifetime="INPUT"), Operand("TENSOR_FLOAT32", (2,), lifetime="OUTPUT")],
        [Operation("RELU", (0,), (1,))],
        (0,),
        (1,),
    )
    main = Subgraph(
        [
            Operand("TENSOR_BOOL8", (1,), lifetime="INPUT", number_of_consumers=1),
            Operand("SUBGRAPH", (), lifetime="SUBGRAPH", value=0),
            Operand("SUBGRAPH", (), lifetime="SUBGRAPH", value=1),
            Operand("TENSOR_FLOAT32", (2,), lifetime="INPUT"),
            Operand("TENSOR_FLOAT32", (2,), lifetime="OUTPUT"),
            Operand("TENSOR_INT32", (2, 2), lifetime="NO_VALUE"),
            Operand("TENSOR_INT32", (2, 2), lifetime="CONSTANT_REFERENCE", value=np.arange(4, dtype=np.int32)),
        ],
        [Operation("IF", (0, 1, 2, 3), (4,))],
        (0, 3),
        (4,),
    )
    return driver.Model(main, (branch, branch), relaxed=True)


@pytest.mark.parametrize(
    "name", ["add_model", "conv_model", "quantised_model", "reshape_model", "open_model", "branching_model"]
)
def test_there_and_back(kit, name):
    """Every model arrives as it was: constants, scales, channels, subgraphs and unknown shapes."""
    model = branching_model() if name == "branching_model" else getattr(kit, name)()
    same(arrived(model), model)


def test_constants_are_aligned_and_shared(kit):
    """Constants lie on 64-byte boundaries of the one sealed memory, and are used where they lie, never written."""
    fds, where = sent(kit.conv_model())
    model = decode(sealed(list(fds), where), where)
    constants = [o.value for o in model.main.operands if o.lifetime.is_constant]
    assert [c.ctypes.data % 64 for c in constants] == [0] * len(constants)
    assert not any(c.flags.writeable for c in constants)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])  # sealed owns it, and an idle model costs no descriptor


def test_strided_constant_travels(device):
    """A constant may be any view of an array."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (2, 3))
    builder.output(builder.operation("ADD", x, np.arange(12, dtype=np.float32).reshape(3, 4).T[::2], 0))
    with device.prepare(builder.build()) as prepared:
        (y,) = prepared.run(np.zeros((2, 3), np.float32))
    assert y.tolist() == [[0, 4, 8], [2, 6, 10]]


def test_not_sealed(device, kit):
    """A model whose memory could still be changed or truncated is refused."""
    data, where = encoded(kit.add_model())
    everything = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    for missing in (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE):
        assert "not sealed" in refused(device, data, where, seals=everything & ~missing)
    future = everything & ~fcntl.F_SEAL_WRITE | F_SEAL_FUTURE_WRITE
    assert "not sealed" in refused(device, data, where, seals=future)  # a mapping from before could still write


def test_not_memory(device):
    """A descriptor that is no memory at all is refused, and so are none and two."""
    read, write = os.pipe()
    with open(read, "rb"), open(write, "wb"), open("/proc/self/exe", "rb") as file:
        for fds in ([read], [file.fileno()], [], [read, write]):
            with pytest.raises(driver.InvalidArgument):
                device.call("prepare", [0, 10], fds=fds)


@pytest.mark.parametrize(
    "where",
    [None, [], [0], "ab", {}, [0, 0], [-1, 5], [0, 10**9], [10**9, 5], [2**63, 2**63], [0, 1.5], [0, 5, 5], [[0], 1]],
    ids=repr,
)
def test_structure_elsewhere(device, kit, where):
    """A structure that is not inside the model's memory is refused."""
    data, _ = encoded(kit.add_model())
    refused(device, data, where)


def lies(structure):
    """(what, structure) of models that are not what they say; `structure` is add_model's."""
    header, counts, *rest = structure
    x, constant, *others = rest
    yield "another version", [[2, *header[1:]], counts, *rest]
    yield "no subgraph", [[1, False, 0], counts, *rest]
    yield "more subgraphs", [[1, False, 2], counts, *rest]
    yield "2^40 subgraphs", [[1, False, 2**40], counts, *rest]
    yield "no header", [7, counts, *rest]
    yield "nothing", [header]
    yield "one operand more", [header, [counts[0] + 1, *counts[1:]], *rest]
    yield "one operand less", [header, [counts[0] - 1, *counts[1:]], *rest]
    yield "one operation more", [header, [counts[0], counts[1] + 1, *counts[2:]], *rest]
    yield "a million operands", [header, [10**6, *counts[1:]], *rest]
    yield "2^63 operands", [header, [2**63, *counts[1:]], *rest]
    yield "negative counts", [header, [-1, -1, *counts[2:]], *rest]
    yield "counts of text", [header, ["4", "1", *counts[2:]], *rest]
    yield "inputs outside", [header, [*counts[:2], [99], counts[3]], *rest]
    yield "inputs of text", [header, [*counts[:2], ["a"], counts[3]], *rest]
    yield "infinite input", [header, [*counts[:2], [float("inf")], counts[3]], *rest]
    yield "a trailing object", [*structure, [1]]
    yield "a trailing nil", [*structure, None]
    yield "constant outside", [header, counts, x, [*constant[:5], [2**40, 16], *constant[6:]], *others]
    yield "constant before", [header, counts, x, [*constant[:5], [-16, 16], *constant[6:]], *others]
    yield "constant not aligned", [header, counts, x, [*constant[:5], [4, 16], *constant[6:]], *others]
    yield "constant too short", [header, counts, x, [*constant[:5], [0, 15], *constant[6:]], *others]
    yield "constant of negative size", [header, counts, x, [*constant[:5], [16, -16], *constant[6:]], *others]
    yield "constant of nothing", [header, counts, x, [*constant[:5], None, *constant[6:]], *others]
    yield "infinite dimension", [header, counts, [x[0], [float("inf")], *x[2:]], constant, *others]
    yield "dimension of nan", [header, counts, [x[0], [float("nan")], *x[2:]], constant, *others]
    yield "negative dimension", [header, counts, [x[0], [-1, 4], *x[2:]], constant, *others]
    yield "a type that is a map", [header, counts, [{"a": 1}, *x[1:]], constant, *others]
    yield "a type that is not there", [header, counts, [999, *x[1:]], constant, *others]
    yield "a lifetime that is not there", [header, counts, [*x[:4], 999, *x[5:]], constant, *others]
    yield "a lifetime that is a list", [header, counts, [*x[:4], [1], *x[5:]], constant, *others]
    yield "scale of text", [header, counts, [*x[:2], "abc", *x[3:]], constant, *others]
    yield "infinite zero point", [header, counts, [*x[:3], float("inf"), *x[4:]], constant, *others]
    yield "operand too short", [header, counts, x[:-1], constant, *others]
    yield "operand of bytes", [header, counts, b"abcdefgh", constant, *others]
    yield "channels that are none", [header, counts, [*x[:6], [[1.0], float("inf")], x[7]], constant, *others]
    yield "a very long name", [*structure[:-1], ["A" * 2**20, *structure[-1][1:]]]
    yield "a very long type", [header, counts, ["A" * 2**20, *x[1:]], constant, *others]
    yield "a very long list", [*structure[:-1], ["ADD", [0] * 200_000, [3]]]
    yield "consumers of text", [header, counts, [*x[:7], "x" * 2**20], constant, *others]


def test_lies(device, kit):
    """Whatever a structure claims, it is an invalid argument, told in few words, and the device is as before."""
    data, where = encoded(kit.add_model())
    for what, structure in lies(objects(data, where)):
        with pytest.raises(driver.InvalidArgument) as caught:
            send(device, "prepare", *rebuilt(data, where, structure))
        assert 0 < len(str(caught.value)) <= 1000, what
    with device.prepare(kit.add_model()) as prepared:
        assert prepared.run(X)[0].tolist() == [[2, 2, 2, 2]]


def test_garbage(device, kit):
    """Bytes that are no msgpack, that nest without end, or that break off, are refused."""
    data, (offset, size) = encoded(kit.add_model())
    for structure in (b"\xc1" * 50, b"\x91" * 5000, b"\xdf\xff\xff\xff\xff", b"\xc7\xff\x01" + bytes(255), bytes(64)):
        refused(device, data[:offset] + structure, [offset, len(structure)])
    for length in range(1, size):
        with pytest.raises(driver.InvalidArgument):
            send(device, "supported", data, [offset, length])


@pytest.mark.parametrize("refused", [150, pytest.param(3000, marks=pytest.mark.stress)])
def test_mutations(device, kit, refused):
    """Random changes of good models never cost more than the call: it succeeds or is refused (seed 20)."""
    source = random.Random(20)
    models = [encoded(m) for m in (kit.add_model(), kit.conv_model(), kit.quantised_model(), branching_model())]
    counts = {True: 0, False: 0}
    while counts[False] < refused:
        data, where = source.choice(models)
        structure = mutated(source, objects(data, where))
        data, where = rebuilt(data, where, structure)
        if source.random() < 0.3:
            data = bytearray(data)
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.randrange(256)
        counts[accepted(device, bytes(data), where)] += 1
    assert device.supported_operations(kit.add_model()) == [True]


def mutated(source, structure):
    """One value somewhere in it becomes another."""
    values = [
        0,
        1,
        -1,
        2**31,
        2**64 - 1,
        -(2**63),
        1.5,
        float("nan"),
        float("inf"),
        "ADD",
        b"",
        None,
        True,
        [],
        {},
        [1],
    ]
    path = source.choice(structure)
    while isinstance(path, list) and path:
        at = source.randrange(len(path))
        if not isinstance(path[at], list) or source.random() < 0.3:
            path[at] = source.choice(values)
            break
        path = path[at]
    return structure


def accepted(device, data, where):
    try:
        (number,), _ = send(device, "prepare", data, where)
    except driver.InvalidArgument:
        return False
    except driver.GeneralFailure as error:
        raise AssertionError(f"{data!r} at {where}") from error
    device.call("free", number)
    return True


@pytest.mark.parametrize("arguments", [(), (1, 2), (None,), ([0, 10], 5)], ids=repr)
def test_wrong_arguments(device, arguments):
    """A call with arguments that its method does not take is an invalid argument."""
    for method in ("prepare", "supported", "free", "burst", "hello", "nonsense"):
        if method == "free" and all(type(number) is int for number in arguments):
            continue  # any number of models
        with pytest.raises(driver.InvalidArgument):
            device.call(method, *arguments)


def test_side_by_side(device, kit):
    """Several prepared models do not get into each other's way, and are freed in any order."""
    prepared = [device.prepare(kit.add_model(float(n))) for n in range(6)]
    order = random.Random(3).sample(range(6), 6)
    while order:
        for n in order:
            assert prepared[n].run(X)[0].tolist() == [[n + 1.0] * 4]
        prepared[order.pop()].close()


def test_closed_model(device, kit):
    """A prepared model that was closed is an invalid argument, told with its number; a burst on it goes on."""
    prepared = device.prepare(kit.add_model())
    with prepared.burst() as burst:
        prepared.close()
        with pytest.raises(driver.InvalidArgument, match=r"prepared model \d+.*may have been closed"):
            prepared.run(X)
        with pytest.raises(driver.InvalidArgument, match=r"prepared model \d+.*may have been closed"):
            prepared.burst()
        assert burst.run(X).outputs[0].tolist() == [[2, 2, 2, 2]]
    prepared.close()


def test_a_closed_models_requests_end_with_it(device, kit):
    """A request that had been executed before the model was closed is refused afterwards like any other."""
    prepared = device.prepare(kit.add_model())
    request, _ = kit.request([X], 16)
    assert prepared.execute(request).status == 0
    prepared.close()
    assert prepared.execute(request).status == driver.InvalidArgument.status


def test_numbers_belong_to_a_connection(connect, kit):
    """A client cannot use another's prepared model by its number."""
    with connect().prepare(kit.add_model()) as mine:
        other = connect()
        request, _ = kit.request([X], 16)
        thief = driver.RemotePreparedModel(
            RemoteExecutor(other, mine.model, mine.home._replace(connection=other.connection))
        )
        assert thief.execute(request).status == driver.InvalidArgument.status
        with pytest.raises(driver.InvalidArgument):
            thief.burst()
        assert mine.execute(request).status == 0


def test_prepared_at_the_same_time(device, kit):
    """Threads that prepare at the same moment get their own models."""
    results, model = {}, kit.add_model

    def prepare(n):
        with device.prepare(model(float(n))) as prepared:
            results[n] = prepared.run(X)[0][0, 0]

    threads = [threading.Thread(target=prepare, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: n + 1.0 for n in range(8)}


def test_models_that_differ_in_one_number(device):
    """Each keeps its own constants, wherever they differ."""
    size, found = 1 << 16, []

    def model(place):
        builder, values = driver.ModelBuilder(), np.zeros(size, np.float32)
        values[place] = 1
        x = builder.input("float32", (size,))
        builder.output(builder.operation("ADD", x, values, 0))
        return builder.build()

    places = (0, 3000, 3001, size - 1)  # in and between the parts of which the device takes a digest
    with contextlib.ExitStack() as stack:
        for prepared in [stack.enter_context(device.prepare(model(place))) for place in places]:
            (y,) = prepared.run(np.zeros(size, np.float32))
            found += np.flatnonzero(y).tolist()
    assert found == list(places)


def test_a_model_is_compared_with_none_that_differs(monkeypatch, kit):
    """However many an account has prepared: equal ones are found by a digest of some of their bytes."""
    store, serves, asked = ModelStore(ReferenceDevice()), SharedModel.serves, []
    held = [store.prepare(*sent(kit.add_model(float(n))), lambda: None) for n in range(50)]
    monkeypatch.setattr(SharedModel, "serves", lambda shared, use: asked.append(shared) or serves(shared, use))
    held.append(store.prepare(*sent(kit.add_model(50.0)), lambda: None))
    assert asked == []
    assert store.prepare(*sent(kit.add_model(7.0)), lambda: None) is held[7]
    assert set(asked) == {held[7]}


def test_a_driver_that_saves_a_model_for_long_keeps_no_request_waiting(kit):
    """While a driver serialises a shared model, other clients' requests on it are bound."""
    begun, may_end = threading.Event(), threading.Event()

    class Slow(ReferenceModel):
        def saved(self, root):
            begun.set()
            may_end.wait(kit.patience)

    model = kit.add_model()
    fds, where = sent(model)
    shared = SharedModel(sealed(fds, where), where, model, Slow(model, lambda: None))

    def save():
        with contextlib.suppress(Declined):
            shared.save(None)

    saving = threading.Thread(target=save)
    saving.start()
    assert begun.wait(kit.patience)
    binding = threading.Thread(target=shared.estimates.of, args=(Request((), (), ()),))
    binding.start()
    binding.join(kit.patience / 2)
    assert not binding.is_alive()
    may_end.set()
    saving.join(kit.patience)
