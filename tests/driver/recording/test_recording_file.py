"""Files that are no recordings, or damaged, or made to do harm: they are read up to there, or refused."""

import os
import random
import struct

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import driver
from driver.recording import BadRecording, Recording, record
from driver.recording.file import as_value
from driver.recording.frames import MAGIC, MOST_WORDS, head

X = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture(scope="module")
def good(tmp_path_factory, kit):
    """The bytes of a recording: one model, two streams, six requests."""
    path = tmp_path_factory.mktemp("good") / "good.burst"
    with record(path), driver.connect("reference") as device, device.prepare(kit.add_model()) as prepared:
        with prepared.burst() as burst:
            for n in range(4):
                burst.run(X + n)
        prepared.run(X)
        prepared.run(X, timeout=5.0)
    return path.read_bytes()


def frame(words, bulk=b""):
    """A frame whose checksums are right."""
    raw = words if isinstance(words, bytes) else msgpack.packb(words)
    return head(raw, [bulk]) + raw + bulk


def read_all(path):
    """Everything that a replay reads: how many requests, and what was refused."""
    refused = []
    with Recording(path) as recording:
        for number in recording.models:
            try:
                recording.model(number)
            except BadRecording as error:
                refused.append(str(error))
        for number in range(len(recording)):
            try:
                run = recording.run(number)
                stream = recording.streams[run.stream]
                operands = recording.model(stream.model).main.operands
                [as_value(part, operands[0]) for part in run.inputs if part]
            except BadRecording as error:
                refused.append(str(error))
        return len(recording), recording.trouble, refused


def test_cut_anywhere(good, tmp_path):
    """A file that ends too early is read up to its last whole request, wherever it was cut."""
    path, counts = tmp_path / "cut", []
    for length in range(len(MAGIC), len(good), 7):
        path.write_bytes(good[:length])
        count, trouble, refused = read_all(path)
        assert "it was cut off at byte" in trouble
        assert not refused
        counts.append(count)
    assert counts == sorted(counts)
    assert set(counts) == set(range(7))


def test_changed_anywhere(good, tmp_path):
    """Whatever bytes are changed: what comes before is read, and nothing that was changed is believed."""
    path, choose = tmp_path / "changed", random.Random(5)
    for _ in range(400):
        data = bytearray(good)
        for _ in range(choose.randint(1, 3)):
            data[choose.randrange(len(MAGIC), len(data))] ^= choose.randint(1, 255)
        path.write_bytes(data)
        _, trouble, refused = read_all(path)
        assert trouble or refused


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
KINDS = st.sampled_from(["begin", "model", "stream", "run", "end", "else"])
PLAUSIBLE = st.one_of(
    st.tuples(st.just("stream"), st.integers(0, 3), st.just(1), st.just("burst"), ANYTHING, ANYTHING),
    st.tuples(st.just("run"), st.just(1), st.integers(0, 9), ANYTHING, ANYTHING, ANYTHING, ANYTHING, ANYTHING),
    st.tuples(
        *(st.just("run"), st.just(1), st.integers(0, 9), st.integers(0, 9), st.none(), st.integers(-2, 9)),
        st.lists(st.tuples(st.lists(st.integers(-1, 2**63), max_size=3), st.integers(-1, 2**63)), max_size=2),
        st.just([]),
    ),
    st.tuples(
        *(st.just("model"), st.integers(0, 3), st.just("reference"), st.just("low_power"), st.just("low"), ANYTHING)
    ),
    st.tuples(KINDS, ANYTHING, ANYTHING),
)


@pytest.mark.integration
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.tuples(PLAUSIBLE, st.binary(max_size=40)), min_size=1, max_size=4))
def test_any_words(good, tmp_path, words):
    """Frames whose checksums are right may say what they like: they are refused, or read; nothing else happens."""
    whole = good[: good.rindex(msgpack.packb("end")) - 25]  # the last frame's head and the beginning of its array
    path = tmp_path / "words"
    path.write_bytes(whole + b"".join(frame(list(each), bulk) for each, bulk in words))
    count, _, _ = read_all(path)
    assert count >= 6


def test_raw_msgpack(good, tmp_path):
    """Arrays that are none, ext types, deep nesting and claims of huge lengths are a damaged frame, at once."""
    path = tmp_path / "raw"
    for raw in (
        b"",
        b"\xc1",
        b"\xd4\x01\x00",
        b"\x91" * 5000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\x01",
        b"\xc6\x7f\xff\xff\xff",
    ):
        path.write_bytes(MAGIC + frame(raw))
        count, trouble, _ = read_all(path)
        assert count == 0
        assert f"at byte {len(MAGIC)}" in trouble


def test_claims_of_lengths(tmp_path):
    """A frame that says that it is huge costs nothing: it is compared with the file first."""
    path = tmp_path / "huge"
    for words, bulk in ((2**32 - 1, 0), (MOST_WORDS + 1, 0), (10, 2**64 - 1), (10, 2**63)):
        path.write_bytes(MAGIC + struct.pack("<IIQ8s", 0, words, bulk, bytes(8)) + bytes(100))
        assert read_all(path)[:1] == (0,)
    with open(path, "r+b") as file:  # a file with a hole
        file.truncate(2**40)
    count, trouble, _ = read_all(path)
    assert count == 0
    assert trouble


def test_no_recordings(tmp_path):
    """Another file, another version, a folder, a pipe and nothing at all are refused with the reason."""
    path = tmp_path / "x"
    for content, why in ((b"", "not a recording"), (b"PK\x03\x04" * 9, "not a recording")):
        path.write_bytes(content)
        with pytest.raises(BadRecording, match=why):
            Recording(path)
    path.write_bytes(MAGIC + frame(["begin", 2, 0.0, 0, 1, "x"]))
    with pytest.raises(BadRecording, match="version 2; this release reads version 1"):
        Recording(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(BadRecording, match="not a recording"):
            Recording(other)
    with pytest.raises(BadRecording, match="cannot be read: No such file"):
        Recording(tmp_path / "missing")
