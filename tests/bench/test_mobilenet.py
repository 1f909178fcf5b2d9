"""MobileNetV1 is what it is called in every form; the scripts that measure it say what they promise."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import driver
from driver.nn import validate

pytestmark = pytest.mark.integration

BENCH = Path(__file__).parents[2] / "bench"

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each side needs a CPU of its own")


def test_every_convolution_has_a_scale_per_channel(models, execute):
    """28 convolutions of bytes with a sign find what the floats they were made of find."""
    model = models.mobilenet("per-channel")
    validate(model)
    operands = model.main.operands
    assert operands[model.main.inputs[0]].type.name == "TENSOR_QUANT8_ASYMM_SIGNED"
    filters = [o for o in operands if o.lifetime.is_constant and len(o.dimensions) == 4]
    assert Counter(len(o.channel_quant[0]) == o.dimensions[o.channel_quant[1]] for o in filters) == {True: 28}
    image = models.feeds_of(model)[0]
    exact = execute(models.mobilenet("float32"), [image.astype(np.float32) / 128])
    assert execute(model, [image])[0].argmax() in np.argsort(exact[0])[::-1][:5]


def test_a_thin_mobilenet_is_a_fraction_of_it(models):
    """Width 0.25 at 128 pixels has the 0.47 million weights that were published for it."""
    model = models.mobilenet("float32", 0.25, 128)
    validate(model)
    weights = sum(np.prod(o.dimensions) for o in model.main.operands if o.lifetime.is_constant and o.dimensions)
    assert round(weights / 1e6, 2) == 0.47


def test_the_file_that_is_written_is_the_same_model(models, litert, tmp_path, execute):
    """Read back by the importer and by LiteRT itself, a scale per channel included, it computes the same."""
    model = models.mobilenet("per-channel", 0.25, 128)
    feed = models.feeds_of(model)[0]
    path = tmp_path / "net.tflite"
    path.write_bytes(litert.written(model))
    mine = execute(model, [feed]).astype(int)
    np.testing.assert_array_equal(execute(driver.load(path, form="operations"), [feed]), mine)
    invoke, answer = litert.runnable(model, [feed])
    invoke()
    np.testing.assert_allclose(answer().reshape(mine.shape), mine, atol=1)


def run(script, tmp_path, *options):
    """Its JSON and what it prints."""
    target = tmp_path / "out.json"
    name, *question = script.split()
    command = [sys.executable, BENCH / name, *question, "--quick", "--json", target, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    lines = [line for table in found["tables"] for line in (table["head"], *table["rows"])]
    return found, done.stdout + "".join(f"\n| {' | '.join(line)} |" for line in lines)


def has_grpc():
    """Whether the peer can run."""
    try:
        import google.protobuf
        import grpc
    except ImportError:
        return False
    return bool(google.protobuf and grpc)


@needs_two_cpus
@pytest.mark.parametrize("threads", ["1", pytest.param("2", marks=pytest.mark.stress)])
def test_a_network_is_run_in_every_way(tmp_path, litert, threads):
    """Each right after LiteRT in process, and all with its result; ADD of 4 floats where everybody is pinned."""
    found, text = run("mobilenet.py", tmp_path, "--threads", threads, "--only", "per-channel")
    rows = {row["name"]: row for row in found["subjects"]}
    floors, small = {"in process: per-channel"}, set()
    ways = {f"per-channel: {way}" for way in ("burst", "burst, spin=1 ms", "plain path, execute", "plain path, run")}
    if threads == "1":
        floors, small = floors | {"floor: limit spin"}, {"ADD of 4 floats: in process", "ADD of 4 floats: burst"}
    peer = rows.pop("per-channel: gRPC")
    assert rows.keys() == floors | ways | small
    assert ("error" in peer) != has_grpc()
    for row in [*rows.values(), *([peer] if has_grpc() else [])]:
        assert len(row["rounds"]) == found["pairs"] == 2
        assert all(0 < block["p50_us"] <= block["p99_us"] for block in row["rounds"])
        assert f"\n| {row['name']} |" in text
    assert len(found["budgets"]) == (2 if threads == "1" else 1)
    assert found["conditions"]["pinned"] == (threads == "1")


@needs_two_cpus
@pytest.mark.stress
def test_numbers_of_threads_are_compared(tmp_path, litert):
    """Every model on each number and on what the device chooses, which is one for what is small, idle and not."""
    found, text = run("mobilenet.py threads", tmp_path)
    assert [found["chosen"][name] for name in ("ADD of 4 floats", "MobileNetV1 0.25, 128 pixels")] == [1, 1]
    states = ("nothing else runs", "a processor is busy")
    expected = {f"{name}; {state}; {who}" for name in found["chosen"] for state in states for who in (1, 2, "chosen")}
    assert {row["name"] for row in found["subjects"]} == expected
    assert all(len(row["rounds"]) == 2 for row in found["subjects"])
    assert all(text.count(f"| {name} |") == 2 for name in found["chosen"])


def test_constants_are_told_by_device_operation_and_pool(tmp_path, litert):
    """Both calls, hashing and a copy, each round; what is not installed is told."""
    found, text = run(
        "cold_start.py constants", tmp_path, "--devices", "reference", "absent", "--megabytes", "1", "--pairs", "1"
    )
    names = [
        f"reference, {operation}, {pool}"
        for pool in ("frozen", "written")
        for operation in ("EMBEDDING_LOOKUP", "FULLY_CONNECTED")
    ]
    *rows, absent = found["subjects"]
    assert [row["name"] for row in rows] == names
    for row in rows:
        for block in row["rounds"]:
            assert block.keys() == {"supported", "prepare", "both", "SHA-256", "copy", "of_hashing"}
            assert min(block[key] for key in ("supported", "prepare", "both", "SHA-256", "copy")) > 0
    assert len(found["budgets"]) == 4
    assert (absent["name"], absent["error"]) == ("absent", "not installed")
    assert all(text.count(name) >= 2 for name in names)


def test_a_cold_start_is_told_stage_by_stage(tmp_path, litert):
    """The stages are there for a device that has to be started and for one that runs; connecting tells them apart."""
    found, text = run("cold_start.py", tmp_path, "--only", "quant8", "--devices", "litert", "absent", "--pairs", "1")
    *rows, absent = found["subjects"]
    rows = {row["name"]: row["rounds"][0] for row in rows}
    assert rows.keys() == {"quant8, litert, started", "quant8, litert, running"}
    stages = ["python", "import", "load", "connect", "prepare", "burst", "first run", "second run"]
    for row in rows.values():
        assert [*row] == [*stages, "to_result"]
        assert min(row.values()) > 0
    assert (absent["name"], absent["error"]) == ("absent", "not installed")
    assert text.count("not installed") == 2


def test_requests_are_those_of_the_protocol(monkeypatch):
    """A model's name is field 1, inputs are field 5 with name, datatype and shape, raw contents are field 7."""
    if not has_grpc():
        pytest.skip("needs grpcio and protobuf")
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    import inference

    array = np.zeros((1, 2), np.int8)
    inputs, raw = [inference.described("x", array)], [array.tobytes()]
    request = inference.Request(model_name="net", inputs=inputs, raw_input_contents=raw)
    assert request.SerializeToString() == b"\x0a\x03net\x2a\x0d\x0a\x01x\x12\x04INT8\x1a\x02\x01\x02\x3a\x02\x00\x00"
