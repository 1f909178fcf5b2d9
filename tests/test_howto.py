"""What the how-to pages promise, beyond the blocks that tests/test_readme.py runs."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from driver.devices import GROUP as DEVICES
from driver.gateway import GROUP as GATEWAYS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/howto").glob("*.md"))
SPAN = re.compile(r"`([^`\n]+)`")
NAME = re.compile(r"\b((?:driver|burst|fmq)(?:\.[A-Za-z_]\w*)+)")
OF_A_BURST = re.compile(r"burst\.(inputs|run|run_async|submit|stream|stats|execute|free_memory|close|steps|trace)\b")


def found(name):
    """Whether such a module, class, function, attribute or header is there. In `burst.run` burst is an open one."""
    headers = [ROOT / "csrc" / library / name for library in ("libburst", "libfmq")]
    if name in (DEVICES, GATEWAYS) or any(header.is_file() for header in headers):
        return True
    if OF_A_BURST.match(name):
        return hasattr(importlib.import_module("driver").Burst, name.split(".")[1])
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            thing = importlib.import_module(".".join(words[:count]))
        except ModuleNotFoundError:
            continue
        for word in words[count:]:
            thing = getattr(thing, word, None)
        return thing is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_names_on_a_page_are_there(page):
    """What a page calls driver.x, burst.x or fmq.x can be imported."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = {name for span in SPAN.findall(text) for name in NAME.findall(span)}
    assert [name for name in sorted(names) if not found(name)] == []


def test_every_function_of_the_ndk_has_a_row():
    """The 69 functions of NeuralNetworks.h and the six of the platform, each once in a table."""
    text = (ROOT / "docs/howto/ndk.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `ANeuralNetworks")]
    names = re.findall(r"`(ANeuralNetworks\w+)`", "".join(rows))
    assert (len(names), len(set(names))) == (75, 75)


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)


def ran(block, folder):
    """What a block prints as a program of its own."""
    (folder / "block.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "block.py"], cwd=folder, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensors_of_torch_lie_in_the_memory_of_a_burst(tmp_path):
    """docs/howto/torch.md: in and out without a copy."""
    pytest.importorskip("torch", reason="no torch: pip install torch")
    (copied, _) = blocks("docs/howto/torch.md")
    assert "[25., 36., 49., 64.]])\n0 bytes copied\ntensor(8.)\n32 bytes copied" in ran(copied, tmp_path)


def test_a_network_of_torch_is_exported_and_runs(tmp_path):
    """docs/howto/torch.md: the same numbers as torch's own."""
    for package in ("torch", "onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"no {package}: pip install torch onnx onnxscript")
    (_, exported) = blocks("docs/howto/torch.md")
    assert "True" in ran(exported, tmp_path).splitlines()


def test_a_process_of_torch_becomes_a_device(tmp_path):
    """docs/howto/torch-multiprocessing.md: both programs run, the second with the bits of torch's own."""
    pytest.importorskip("torch", reason="no torch: pip install torch")
    before, after = blocks("docs/howto/torch-multiprocessing.md")
    assert "torch.Size([1, 2])" in ran(before, tmp_path)
    assert "torch.Size([1, 2]) True" in ran(after, tmp_path)


@pytest.mark.integration
def test_ten_lines_run_a_model_file(tmp_path):
    """docs/start.md: the script, on a file that a vendor's converter wrote."""
    shutil.copy(ROOT / "tests/driver/importers/vendor/mobilenet_int8.tflite", tmp_path / "model.tflite")
    script, _ = blocks("docs/start.md")
    assert "int8 [" in ran(script, tmp_path)


@pytest.mark.integration
def test_a_driver_in_c_from_its_page_alone(tmp_path):
    """docs/howto/device-c.md, as it is printed: its source compiles without a warning, passes the kit, and runs."""
    page = (ROOT / "docs/howto/device-c.md").read_text()
    (source,) = re.findall(r"^```c\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "negator.c").write_text(source)
    build, kit = re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    how = {"cwd": tmp_path, "env": os.environ | {"PATH": path}, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(["bash", "-ec", build], check=False, **how)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(["bash", "-ec", kit], check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"operations +│ +9 │ +0 │", done.stdout)
    assert "not tested: request, burst" in done.stdout  # which need ADD
    (program,) = blocks("docs/howto/device-c.md")
    assert ran(program, tmp_path) == "[-0. -1. -2. -3.]\n"


@pytest.mark.stress
def test_five_commands_lead_a_newcomer_to_a_result(tmp_path):
    """docs/start.md: from a clone, in an empty environment, to what a model file of one's own answers."""
    page = (ROOT / "docs/start.md").read_text()
    commands = re.search(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE)[1].splitlines()
    assert len(commands) == 5
    shutil.copy(ROOT / "tests/driver/importers/vendor/mobilenet_int8.tflite", tmp_path / "model.tflite")
    script, _ = blocks("docs/start.md")
    (tmp_path / "ten.py").write_text(script)
    paths = f"{Path(sys._base_executable).parent}:/usr/bin:/bin"
    empty = {"PATH": paths, "HOME": str(tmp_path), "BURST": str(ROOT), "BURST_RUNTIME_DIR": str(tmp_path / "run")}
    done = subprocess.run(
        ["bash", "-exc", "\n".join([*commands, "python -W error ten.py"])],
        cwd=tmp_path,
        env=empty | {name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "int8 [" in done.stdout
