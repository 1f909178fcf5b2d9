"""docs/protocol.md says what the sources do: its bytes, its tables, its figures."""

import inspect
import os
import re
import struct

import msgpack
import numpy as np
import pytest
from protocol_page import ANSWER, EXAMPLE, PROSE, SUM, X, block, camel, first, messages, raw, said, table

import driver
import fmq
from burst import ErrorStatus, Malformed, OutputShape, RequestArgument, Timing, channel, server
from burst._core import lib as bursts
from burst.channel import MAX_BYTES, MAX_FDS
from burst.datum import DATUM, DATUM_DTYPE, FmqRequestDatum, FmqResultDatum
from burst.wire import (
    VERSIONS,
    RequestPacket,
    ResultPacket,
    Token,
    decode_request,
    decode_result,
    encode_request,
    encode_result,
)
from driver.client import discovery
from driver.engine.lane import MOST_KEPT
from driver.engine.lane_reader import LaneReader
from driver.engine.limits import Limits
from driver.nn.types import OperandLifeTime, OperandType
from driver.protocol import lane_codec, model_codec, rpc, stream_terms
from driver.protocol.fences import MOST_FENCES
from driver.service import process
from driver.service.service_client import FORWARDED, ServiceClient
from fmq._core import ffi, lib
from fmq.geometry import CONTROL, Geometry, dtype_text
from fmq.role import LIFE_AT

# ---- bytes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["messages", "plain", "fenced"])
def test_messages_are_what_they_say(name):
    """Each message's bytes are msgpack's for the value beside them."""
    assert b"".join(messages(name)) == raw(block(f"hex {name}"))


def test_the_model_is_the_example_that_it_says_it_is():
    """Its bytes are what the encoder makes of ADD, its comments what they decode to, and `prepare` says where."""
    builder = driver.ModelBuilder()
    x, y = builder.input("float32", (1, 4)), builder.input("float32", (1, 4))
    builder.output(builder.operation("ADD", x, y, 0))
    model = model_codec.encode(builder.build())
    where, lines = model.where, block("hex model")
    assert os.pread(model.fd, 2 * len(raw(lines)), 0) == raw(lines)
    assert b"".join(map(msgpack.packb, said(lines[1:]))) == raw(lines[1:])
    assert where == [4, len(raw(lines)) - 4] == said(block("hex messages"))[1][2]
    assert f"The structure is `{where}`" in PROSE


def test_the_request_and_its_result_are_what_the_codec_makes_of_them():
    """In version 2 as printed; in version 1 with the changes that the page names."""
    request, result = raw(block("hex request 2")), raw(block("hex result 2"))
    assert encode_request(EXAMPLE, 2) == request
    assert encode_result(ANSWER, 2) == result
    assert decode_request(request, 2) == EXAMPLE
    assert decode_result(result, 2) == ANSWER
    assert "first six elements, and the first one says 06 in place of 08" in PROSE
    assert encode_request(EXAMPLE, 1) == first(request, 6, at=4)
    assert "first five elements, and the first one says 05" in PROSE
    assert encode_result(ANSWER, 1) == first(result, 5, at=8)


def test_a_descriptor_is_what_fmq_writes():
    """The queues of the `burst` message, and how a control page names its elements."""
    with fmq.MessageQueue.create(DATUM_DTYPE, 1024) as queue:
        plain_form, fds = queue.descriptor.to_wire()
        assert [plain_form] * 2 == said(block("hex messages"))[3][3:5]
        assert len(fds) == 1
    text = dtype_text(np.dtype(DATUM_DTYPE))
    digest = Geometry.of(DATUM_DTYPE, 1024).shape.dtype_hash
    assert f"the {len(text)} bytes `{text}`, quotes included. Its hash is {digest:#x}." in PROSE


# ---- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "kinds"), [("request element", FmqRequestDatum), ("result element", FmqResultDatum)])
def test_the_elements_are_the_codec_s(head, kinds):
    """All kinds in their order, and each field where the codec puts it, as wide as the codec makes it."""
    rows = table(head)
    assert [(name, int(number)) for name, number, *_ in rows] == [(camel(kind.name), kind.number) for kind in kinds]
    for kind, (_, _, _, payload) in zip(kinds, rows, strict=True):
        fields = [field.split() for field in payload.split(", ")]
        in_dtype = [(str(at), name, type_.str) for name, (type_, at) in kind.dtype.fields.items()]
        codes = {"bool": "|b1", "u32": "<u4", "i32": "<i4", "u64": "<u8"}
        assert in_dtype == [("0", "discriminator", "|u1"), *((at, name, codes[type_]) for at, name, type_ in fields)]
        zeros = [0] * len(fields)
        for n, (at, _, type_) in enumerate(fields):
            layout = {"bool": "?", "u32": "I", "i32": "i", "u64": "Q"}[type_]
            value = 1 if type_ == "bool" else -1 if type_ == "i32" else 256 ** struct.calcsize(layout) - 1
            filled = kind.struct.pack(kind.number, *zeros[:n], value, *zeros[n + 1 :])
            expected = bytearray(DATUM)
            expected[0] = kind.number
            struct.pack_into(f"<{layout}", expected, int(at), value)
            assert filled == bytes(expected), (kind.name, at)
            if type_ != "bool":
                with pytest.raises(struct.error):  # it is no wider
                    kind.struct.pack(kind.number, *zeros[:n], 2 ** (8 * struct.calcsize(layout)), *zeros[n + 1 :])


NOTHING = RequestArgument(has_no_value=True)
REQUESTS = [
    EXAMPLE,
    RequestPacket((), (), (), measure=True, id=7),
    RequestPacket((NOTHING, X._replace(dimensions=(1, 4))), (SUM._replace(dimensions=(4,)),), (3, 1), True, None, 9),
]
TOKENS = RequestPacket((X,), (SUM._replace(pool=1),), (Token(5), 0), False, 10**9, 3, 10**12)
RESULTS = [
    ANSWER,
    ResultPacket(ErrorStatus.NONE, (), Timing(3, 4), 2),
    ResultPacket(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((2, 3), False), OutputShape()), Timing(), 2),
    ResultPacket(ErrorStatus.GENERAL_FAILURE, (), Timing()),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_elements_come_in_that_order(version):
    """The orders, read as patterns, match packets of many shapes, of the elements that the version has."""
    rules = dict(line.split(" = ") for line in block("order"))
    requests = [encode_request(packet, version) for packet in (REQUESTS if version == 1 else [*REQUESTS, TOKENS])]
    results = [encode_result(packet, version) for packet in RESULTS]
    for what, kinds, packets in [("request", FmqRequestDatum, requests), ("result", FmqResultDatum, results)]:
        pattern = re.compile(as_pattern(rules, f"{what} {version}"))
        names = {kind.number: camel(kind.name) for kind in kinds}
        for packet in packets:
            assert pattern.fullmatch("".join(f"{names[number]} " for number in packet[::DATUM])), packet
        allowed = {name for name, _, since, _ in table(f"{what} element") if int(since) <= version}
        assert allowed == set(re.findall(r"\w+(?= )", pattern.pattern))
    assert {int(rule.split()[1]) for rule in rules if rule[-1].isdigit()} == set(VERSIONS)


def as_pattern(rules, name):
    """A rule as a regular expression over names with a blank after each."""
    spelt = rules[name]
    while shorter := set(re.findall(r"\w+", spelt)) & set(rules):
        spelt = re.sub(r"\w+", lambda word: f"({rules[word[0]]})" if word[0] in shorter else word[0], spelt)
    return re.sub(r"\w+", r"(\g<0>_)", spelt).replace(" ", "").replace("_", " ")


def test_version_1_has_no_words_for_what_is_new():
    """Tokens, loop timeouts and deadlines are refused there, and the later statuses become GENERAL_FAILURE."""
    for changed in (TOKENS, EXAMPLE._replace(loop_timeout=1), EXAMPLE._replace(deadline=1)):
        with pytest.raises(Malformed):
            encode_request(changed, 1)
    for status in ErrorStatus:
        sent = decode_result(encode_result(ResultPacket(status, (), Timing()), 1), 1).status
        assert sent == (ErrorStatus.GENERAL_FAILURE if status > 4 else status)
    assert "In wire version 1 a status above 4 travels as GENERAL_FAILURE" in PROSE


def test_numbers_with_names_are_the_sources():
    """Statuses, operand types, lifetimes: all of them, with their numbers."""
    assert {int(number): name for number, name in table("status")} == {int(s): s.name for s in ErrorStatus}
    rows = table("type")
    types = {int(number): name for number, name, *_ in rows}
    assert types == {int(t): t.name for t in OperandType if t < OperandType.OEM}
    lifetimes = {int(number): name for *_, number, name in rows if name}
    assert lifetimes == {int(life): life.name for life in OperandLifeTime}


def test_the_methods_are_the_service_s():
    """All of them."""
    source = inspect.getsource(ServiceClient.__init__) + inspect.getsource(ServiceClient.methods_of_renewal)
    assert {row[0] for row in table("method")} == {*re.findall(r'"(\w+)":', source), *FORWARDED}


def test_the_messages_of_a_lane_are_the_engine_s():
    """All that have no number."""
    words = re.findall(r'case \["(\w+)"', inspect.getsource(LaneReader._manage))
    assert [found[1] for row in table("client sends") if (found := re.match(r'\["(\w+)"', row[0]))] == words


def test_life_words_mean_what_the_page_says():
    """Each word, put before fmq_life_state; and a page is what a process makes for another."""
    for words, meaning, state in table("word"):
        word = sum(int(number, 16) for number in re.findall(r"0x\w+", words)) + ("thread" in words)
        assert lib.fmq_life_state(ffi.new("uint32_t *", word)) == int(state), meaning
    assert len(table("word")) == 4
    page = fmq.LifePage()
    assert os.fstat(page.fd).st_size == 4096
    page.close()


def test_roles_lie_where_the_page_says():
    """Number, locked byte and life word of each: where another process's role shows."""
    assert [(name, int(n), int(at)) for name, n, _, at in table("role")] == [
        ("writer", lib.FMQ_WRITER, LIFE_AT[lib.FMQ_WRITER]),
        ("reader", lib.FMQ_READER, LIFE_AT[lib.FMQ_READER]),
    ]
    with fmq.MessageQueue.create(DATUM_DTYPE, 4) as queue, queue.writer(), queue.reader():
        fd = queue.descriptor.fds[0]
        for _, which, byte, _ in table("role"):
            assert fmq.role.is_taken(fd, 0, int(which))
            assert fmq.role.is_taken(fd, int(byte), 0)
        assert not fmq.role.is_taken(fd, 2, 0)


FIGURES = [
    f"at most {MAX_BYTES} bytes and {MAX_FDS} descriptors",
    f"unread for {struct.unpack('ll', channel._SEND_TIMEOUT)[0]} s is given up",
    f"ends {process.LINGER:.0f} s after its last client",
    f"`hello` | protocol, which is {rpc.PROTOCOL};",
    f"at most {model_codec._MAX_STRUCTURE >> 20} MiB",
    f"two counts of at most 2^{model_codec._MAX_COUNT.bit_length() - 1}",
    f"each at a multiple of {model_codec._ALIGN}",
    f"A memfd of {CONTROL} bytes and the ring, length x {DATUM} bytes",
    f"length is from 1 to {server._MAX_LENGTH} elements",
    f"Answer within {server._CALLBACK_TIMEOUT:.0f} s",
    f"from 0 to 2^{bursts.BURST_LAST_SLOT.bit_length()} - 1",
    f"one each, at most {MAX_FDS}",
    f"when {Limits.client_launched} executions are pending or {Limits.client_fences} fences of others are watched",
    f"With {Limits.client_async} asynchronous executions pending",
    f"from 1 to 2^{stream_terms.MOST_STEPS.bit_length() - 1}; `room`",
    f"there is memory, from 1 to {stream_terms.MOST_ROOM}",
    f"at most {stream_terms.MOST_ELEMENTS} in memory, are one of at most {stream_terms.MOST_VALUES} integers",
    f"One execution waits for {MOST_FENCES} fences at most",
    f"keeps {MOST_KEPT} answers",
    f"`{lane_codec.IN_TURN[1:].hex()}` and eight more",
]


@pytest.mark.parametrize("figure", FIGURES)
def test_figures_are_the_sources(figure):
    """Bounds, times and limits."""
    assert figure in PROSE


def test_a_device_is_found_where_the_page_says(monkeypatch, tmp_path):
    """The directory by the environment, and the file by the device's name."""
    assert "`$BURST_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/burst`, else `/tmp/burst-<uid>`" in PROSE
    (tmp_path / "own").mkdir(mode=0o700)
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert discovery.runtime_dir() == tmp_path / "own"
    monkeypatch.delenv("BURST_RUNTIME_DIR")
    assert discovery.runtime_dir() == tmp_path / "burst"
    assert discovery.Place(tmp_path, "a:B/c_1.-").socket == tmp_path / "a_B_c_1.-.sock"
