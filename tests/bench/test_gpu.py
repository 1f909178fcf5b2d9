"""bench/gpu.py says what ran and what did not, with a GPU and without one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import swiftshader
from fake_cuda import FakeCuda, Word

SCRIPT = Path(__file__).parents[2] / "bench/gpu.py"
CHECKS = ["pinning", "launch", "models", "depth", "clients", "recovery"]


def ran(*words, ends):
    """The lines of a run."""
    command = [sys.executable, SCRIPT, "--quick", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == ends, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def no_library(tmp_path, monkeypatch):
    """A home whose options name a libcuda.so.1 that is not there, whatever the machine has."""
    options = tmp_path / "home/.config/burst/cuda.toml"
    options.parent.mkdir(parents=True)
    options.write_text(f'library = "{tmp_path}/libcuda.so.1"\n')
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.integration
def test_without_a_gpu_it_fails(no_library):
    """It says that there is none, and why, and runs nothing."""
    (line,) = ran("--device", "onnxruntime", ends=1)
    assert line == "no GPU: the device onnxruntime is of type CPU"
    (line,) = ran("--device", "no-such-device", ends=1)
    assert line == "no GPU: no device 'no-such-device' is installed"


@pytest.mark.integration
def test_without_a_gpu_every_check_says_why(no_library, tmp_path):
    """With --allow-none it ends well, with a line for each check that did not run."""
    pytest.importorskip("onnx")
    out = tmp_path / "rows.json"
    words = "--device", "no-such-device", "--allow-none", "--only", *CHECKS
    lines = ran(*words, "--json", out, ends=0)
    assert [line.split()[0] for line in lines[1:]] == ["pinning", "launch", *CHECKS[1:]]
    assert all("did not run: " in line for line in lines[1:])
    assert "libcuda.so.1" in lines[1]
    assert [row["check"] for row in json.loads(out.read_text())["rows"]] == ["pinning", "launch", *CHECKS[1:]]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A libcuda.so.1 without a GPU."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = FakeCuda(tmp_path)
    found.configure()
    return found


@pytest.mark.integration
def test_pinning_and_a_launch_on_the_fake(fake):
    """Both mappings of a pool are pinned, their bytes arrive, and a kernel of the script's runs and is waited for."""
    lines = ran("--device", "no-such-device", "--allow-none", "--only", "pinning", "launch", ends=0)
    assert [line.split(": ")[0].split(maxsplit=1)[1] for line in lines[1:]] == [
        "sealed pool, pinned",
        "read-only sealed pool, pinned",
        "pageable memory",
        "a bare launch and wait",
        "did not run",
    ]
    assert lines[4].endswith(" us")
    assert all("copied in at" in line for line in lines[1:4])
    assert fake.used == fake.registered == 0


@pytest.mark.integration
def test_a_model_that_fails_stops_no_other(no_library, tmp_path):
    """A file that is none, one that is not there, and a model that was not given have a row each; the rest runs."""
    pytest.importorskip("onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    files = tmp_path / "broken.onnx", tmp_path / "absent.onnx"
    lines = ran("--device", "onnxruntime", "--allow-none", "--only", "models", "--models", *files, ends=0)
    found = {line.split(": ")[0].split(maxsplit=1)[1]: line for line in lines[1:]}
    assert list(found) == ["mobilenet_v1.onnx", "encoder.onnx", "yolov8n.onnx", "broken.onnx", "absent.onnx"]
    assert "name the file after --models" in found["yolov8n.onnx"]
    assert "failed: " in found["broken.onnx"]
    assert "is no file" in found["absent.onnx"]
    assert all("in process" in found[name] for name in ("mobilenet_v1.onnx", "encoder.onnx"))


@pytest.mark.integration
def test_a_check_that_hangs_is_given_up(fake, tmp_path):
    """After --limit seconds; the file has what was found before, and the next check runs."""
    out = tmp_path / "rows.json"
    fake[Word.HOLD_IN] = 1
    words = ("--device", "no-such-device", "--allow-none", "--only", "pinning", "models", "--limit", "3")
    lines = ran(*words, "--json", out, ends=0)
    assert "limit of 3 s" in lines[1]
    assert "did not run" in lines[2]
    assert [row["check"] for row in json.loads(out.read_text())["rows"]] == ["pinning", "models"]


def test_graphs_are_asked_for_beside_the_options_that_are_there(no_library, monkeypatch, tmp_path):
    """In a home of the script's own; the user's files stay as they are."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    options = Path.home() / ".config/burst/onnxruntime-cuda.toml"
    options.write_text("device = 1\ngraphs = false\n")
    monkeypatch.setenv("HOME", str(Path.home()))  # what the script sets is undone after the test
    gpu.configure_graphs(tmp_path / "other", "onnxruntime-cuda")
    assert Path.home() == tmp_path / "other"
    assert (Path.home() / ".config/burst/onnxruntime-cuda.toml").read_text() == "device = 1\ngraphs = true\n"
    assert (Path.home() / ".config/burst/cuda.toml").exists()
    assert options.read_text() == "device = 1\ngraphs = false\n"


@pytest.mark.integration
def test_the_checks_of_a_device_run_on_any(no_library):
    """On the CPU's device: the same session in process, requests in flight, clients that live through a kill."""
    lines = ran("--device", "onnxruntime", "--allow-none", "--only", "launch", "models", "depth", "recovery", ends=0)
    found = {line.split(": ")[0].split(maxsplit=1)[1]: line for line in lines[1:]}
    assert "burst" in found["mobilenet_v1.onnx"]
    assert "burst" in found["encoder.onnx"]
    assert "3 of 3 were served again" in found["engine killed"]
    assert "with 4 in flight" in next(line for line in lines if line.startswith("depth"))
    assert not any("failed" in line for line in lines)


@pytest.mark.integration
def test_a_provider_in_software(no_library, monkeypatch, tmp_path):
    """On SwiftShader an ADD goes through a burst, also beside the session in process; that is no GPU, which the script
    says.
    """
    swiftshader.configure(tmp_path / "home")
    lines = ran("--device", "onnxruntime-webgpu", "--allow-none", "--only", "launch", "webgpu", ends=0)
    assert lines[0] == "no GPU: the device onnxruntime-webgpu is of type CPU"
    assert " us" in next(line for line in lines if "ADD of 4 floats" in line)
    assert "addition.onnx on a CPU: in process" in lines[-1]


@pytest.mark.integration
def test_on_stand_ins_it_runs_whole(tmp_path):
    """As `make gpu` does on a machine without a GPU: every check runs on a CUDA that is none, and none fails."""
    out = tmp_path / "rows.json"
    lines = ran("--stand-ins", "--json", out, ends=0)
    found = {f"{row['check']}, {row['subject']}": row["words"] for row in json.loads(out.read_text())["rows"]}
    assert not [line for line in lines if "failed" in line], lines
    assert "no byte was copied by the CPU" in found["lane, pools of the client, in place"]
    assert "20 steps that never left the GPU" in found["lane, a state in buffers of the device"]
    assert "served again after" in found["lane, engine killed"]
    assert "the device's part runs" in found["played, Torch"]
    assert "3 of 3 were served again" in found["recovery, engine killed"]
    assert {row["check"] for row in json.loads(out.read_text())["rows"]} >= {
        *CHECKS,
        *("lane", "library", "torch", "jax", "webgpu"),
    }


def test_a_machine_with_a_gpu_and_without_onnxruntime_gpu(monkeypatch):
    """It has a GPU: what needs that package says so, and the other checks run."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import gpu

    monkeypatch.setattr(gpu, "missing_gpu", lambda: None)
    assert gpu.no_gpu("onnxruntime-cuda") == ""
    monkeypatch.setattr(gpu, "missing_gpu", lambda: "there is none")
    assert gpu.no_gpu("onnxruntime-cuda") == "there is none"


@pytest.mark.integration
def test_no_check_begins_when_no_time_is_left(no_library):
    """All of them together take --total seconds at most."""
    lines = ran("--device", "no-such-device", "--allow-none", "--only", "launch", "models", "--total", "0", ends=0)
    assert [line.split(": ")[1] for line in lines[1:]] == ["no time is left (--total)"] * 2
