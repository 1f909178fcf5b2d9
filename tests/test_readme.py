"""The code in the README and in the guides runs."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
EXPECTED = {  # of each block, in order: lines of its output
    "README.md": [["(<edges: float32 [1, 1, 62, 62]>,)\n(1, 1, 62, 62)\n46 NONE\n30 NONE\n14 NONE\n"]],
    "docs/audio.md": [["[[0. 0. 0. 0.]]\n[[1. 1. 1. 1.]]\n[[3. 3. 3. 3.]]"]],
    "docs/bursts.md": [
        ["[2. 3. 4. 5.]\n[1. 1. 1. 1.]"],
        ["[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]\n1.0 2.0 3.0 4.0 5.0 6.0 1.0"],
        ["[2.0, 4.0, 8.0, 16.0, 32.0] until"],
        ["{'burst': 300, 'plain': 0} ['encode', 'queue', 'wake', 'bind', 'execute', 'return', 'total']\n2"],
    ],
    "docs/importers.md": [["(1, 20)"], ["True True"]],
    "docs/models.md": [["[[75 75 75 75 75 75 75 75]]"], ["[1024.] [10]"]],
    "docs/runtime.md": [
        ["[0, 1]\n(output_0: float32[4] [0.0, 2.0, 6.0, 12.0])\n[ 2.  6. 12. 20.] 0\nreference (2 operations)"]
    ],
    "docs/devices.md": [["[False, True]"]],
    "docs/extensions.md": [["(('com.example.points', 1),)\n[ 0.+1.j -1.+0.j  0.+2.j]"]],
    "docs/caching.md": [["'saved'", "'restored'"], ["''\n(output_0: float32[4] [2.0, 2.0, 2.0, 2.0])"]],
    "docs/fences.md": [["ACTIVE GENERAL_FAILURE\n[[7. 7. 7. 7.]] SIGNALED\nTrue"]],
    "docs/qos.md": [
        ["[1. 1. 1. 1.]\n[1. 1. 1. 1.]\nMissedDeadlinePersistent"],
        ["(output_0: float32[4] [1.0, 1.0, 1.0, 1.0])"],
        ["1"],
        ["camera None"],
    ],
    "docs/serving.md": [["[1. 2. 3. 4.]"]],
    "docs/watching.md": [["ADD 100 burst True"]],
    "docs/recording.md": [["3 3 0\n[4. 4. 4. 4.]"]],
    "docs/memory.md": [
        ["[2. 3. 4. 5.] NONE\n[2. 3. 4. 5.] 0"],
        ["True [[4. 4. 4. 4. 4. 4. 4. 4.]]"],
        ["(1, 720, 640, 1) 130 0"],
        ["[5. 5. 5. 5.]"],
    ],
    "docs/howto/agents.md": [["[('coder', 1.0), ('critic', 1.0), ('planner', 1.0)]"]],
    "docs/howto/asyncio.md": [
        ["[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]\n8 answered, 0 refused"],
        ["[1.0, 2.0, 3.0, 4.0, 5.0]\n[1. 1. 1. 1.]"],
        ["Counter({200: 50}) {'column': 30}\n413 a picture of at most 1048576 bytes, please\n415 no picture"],
        ["[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]\n1.0 2.0 3.0 \n[1. 1. 1. 1.]\n[8. 8. 8. 8.]"],
    ],
    "docs/howto/audio.md": [["0 0.040\n10 0.084\n20 0.088\n30 0.088\n40 0.088"]],
    "docs/howto/camera.md": [
        ["0 bytes copied by the burst"],
        ["[89 89 89] True"],
        ["['burst_camera_frames', 'burst_camera_copied_bytes', 'burst_camera_held', 'burst_camera_buffers',"],
    ],
    "docs/howto/device.md": [["[True, True, True]\n[-0. -1. -2. -3.]"]],
    "docs/howto/device-burst.md": [["NONE [2. 3. 4. 5.]"]],
    "docs/howto/multiprocessing.md": [*[["[[0. 0. 0. 0.]]\n[[0. 0. 0. 0.]]\n[[2. 2. 2. 2.]]"]] * 4, []],
    "docs/howto/joined.md": [["[1.0, 2.0, 3.0, 4.0]"]],
    "docs/howto/litert.md": [["(1, 20)"]],
    "docs/howto/ndk.md": [["[1. 2. 3. 4.]"]],
    "docs/howto/oip.md": [["[[1. 2. 3. 4.]]\n[[2. 3. 4. 5.]]"]],
    "docs/howto/triton.md": [["[1. 2. 3. 4.]"]],
    "docs/broadcast.md": [
        ["[1 2 3 4] [1]\n3 [0, 3]\n", "the writer evicted this reader", "\n[5 6]"],
        ["b'short'\n100000"],
        ["4999950000.0"],
        ["[5]"],
    ],
    "docs/queues.md": [
        ["[1 2]\n[3 4]\nthe writer has left"],
        ["6 0 15.0", "2 2"],
        ["(1, 480, 640, 3) 127.5"],
        ["[1 2 3]\n[5]\nlost 4 goes on at 7\n[8 9]"],
        ["[1] [7]\n4"],
        ["[1 2]\nTrue"],
        ["released nobody 3 True\n[1 2 3]"],
    ],
    "docs/start.md": [["(1, 20) float32 ["], ["[[1. 1. 1. 1.]]\n[[2. 2. 2. 2.]]\n[[3. 3. 3. 3.]]"]],
}
ELSEWHERE = {  # pages whose blocks need more than a program, and the tests that give it
    "docs/conformance.md": "tests/driver/vts/test_conformance_page.py",
    "docs/howto/c.md": "tests/libburst/test_page.py",
    "docs/howto/device-c.md": "tests/test_howto.py",
    "docs/howto/gateway.md": "tests/driver/gateways/test_plug_ins.py",
    "docs/howto/gpu.md": "tests/driver/devices/test_provider_device.py",
    "docs/howto/onnxruntime.md": "tests/driver/dropin/test_page.py",
    "docs/howto/torch.md": "tests/test_howto.py",
    "docs/howto/torch-multiprocessing.md": "tests/test_howto.py",
}
NETWORK = ROOT / "tests/driver/importers/vendor/mobilenet_float32.tflite"
BLOCK = re.compile(r"^```(?:python|py)\b.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks():
    for path, expected in EXPECTED.items():
        found = BLOCK.findall((ROOT / path).read_text())
        for number, (block, lines) in enumerate(zip(found, expected, strict=True)):
            marks = () if path == "README.md" else pytest.mark.integration
            yield pytest.param(path, block, lines, id=f"{path}-{number}", marks=marks)


PROCESSES = ("README.md", "docs/howto/agents.md", "docs/howto/multiprocessing.md")  # of an interpreter of their own
# An interpreter with the libraries in it that forks for each program: importing them takes most programs' time.
FORKS = """
import json, os, runpy, sys
import numpy, fmq, burst, driver
for line in sys.stdin:
    program, folder = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder)
sys.argv = [program]
for name, fd in ("out", 1), ("err", 2):
    os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), fd)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
runpy.run_path(program, run_name="__main__")
"""


@pytest.fixture(scope="module")
def forked():
    """forked(program, folder): its exit status and what it printed."""
    command = [sys.executable, "-W", "error", "-c", FORKS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:

        def run(program, folder):
            parent.stdin.write(json.dumps([str(program), str(folder)]) + "\n")
            parent.stdin.flush()
            status = int(parent.stdout.readline())
            return SimpleNamespace(
                returncode=status, stdout=(folder / "out").read_text(), stderr=(folder / "err").read_text()
            )

        yield run
        parent.stdin.close()


def spawned(program, folder):
    command = [sys.executable, "-W", "error", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)


@pytest.mark.parametrize(("page", "block", "expected"), list(blocks()))
def test_a_block_runs_as_a_program(page, block, expected, tmp_path, forked):
    """Each Python block is a whole program that prints what it promises and warns of nothing."""
    if re.search(r"^from fastapi ", block, re.MULTILINE):  # Ray brings it
        for package in ("fastapi", "httpx"):
            pytest.importorskip(package, reason=f"no {package}: pip install {package}, or -e '.[ray]'")
    program = tmp_path / "block.py"
    program.write_text(block)
    if page != "README.md":  # whose program runs as it stands
        for name in ("mobilenet.tflite", "model.tflite"):  # what a reader has
            (tmp_path / name).symlink_to(NETWORK)
    done = (spawned if page in PROCESSES else forked)(program, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in expected:
        assert line in done.stdout


def test_no_block_is_left_out():
    """Every page with Python on it is in one of the two lists above, or in a test that names it."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    found = {str(page.relative_to(ROOT)) for page in pages if BLOCK.search(page.read_text())}
    assert found - ELSEWHERE.keys() == EXPECTED.keys()
    for page in found & ELSEWHERE.keys():
        assert Path(page).name in (ROOT / ELSEWHERE[page]).read_text(), page


def test_the_readme_fits_one_screen():
    """What it is, about twenty lines of code, one table, two commands; the rest is in the documentation."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 55
    (block,) = BLOCK.findall(text)
    assert len(block.splitlines()) <= 20
    assert len(re.findall(r"^\| ---|^\|---", text, re.MULTILINE)) == 1
    assert len(re.findall(r"^    \S", BLOCK.sub("", text), re.MULTILINE)) == 2


def test_the_guide_fits_one_reading():
    """And names every error there is."""
    text = (ROOT / "docs/queues.md").read_text()
    assert len(text.splitlines()) <= 250
    errors = re.findall(r"[├└]── (\w+)", (ROOT / "fmq/errors.py").read_text())
    assert [name for name in errors if f"| `{name}` |" not in text] == []
