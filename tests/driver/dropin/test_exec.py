"""`burst exec`: programs that nobody changed, by the command line."""

import json
import os
import signal
import subprocess
import sys

import onnxruntime as real
import pytest
from dropin_nets import feed

from driver.dropin.environment import STARTUP

PROGRAM = """
import sys
import numpy as np
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
print(type(session).__module__, session.run(None, {"x": x})[0].tobytes().hex())
"""


def execute(*words, options=(), **more):
    """`burst exec`: what the program printed, on both streams."""
    command = [sys.executable, "-m", "burst_engine", "exec", *options, "--", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | more, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split(), ended.stderr


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def expected(net):
    return real.InferenceSession(net, providers=["CPUExecutionProvider"]).run(None, feed())[0].tobytes().hex()


def test_a_program_runs_in_a_device(home, program, net, expected, tmp_path):
    """The same bits, and the report says where it ran."""
    report = tmp_path / "report.json"
    (module, found), error = execute(sys.executable, program, net, options=("--report", str(report)))
    assert (module, found) == ("driver.dropin.onnxruntime", expected)
    (process,) = json.loads(report.read_text())["processes"]
    assert process["models"] == [{"model": "net.onnx", "device": "onnxruntime", "sessions": 1, "device_runs": 1}]
    assert process["in_process"] == []
    assert "1 runs in a device" in error


@pytest.mark.integration
def test_its_own_sitecustomize_runs_and_children_have_it(home, net, expected, tmp_path, program):
    """A program that starts others, with a sitecustomize of its own and PYTHONPATH set."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys; sys.its_own = __file__")
    parent = "import subprocess, sys; print(sys.its_own); subprocess.run(sys.argv[1:], check=True)"
    words = [sys.executable, "-c", parent, sys.executable, program, net]
    found, _ = execute(*words, PYTHONPATH=str(folder))
    assert found == [str(folder / "sitecustomize.py"), "driver.dropin.onnxruntime", expected]


@pytest.mark.integration
def test_multiprocessing_children_have_it(home, net, expected, tmp_path):
    """By spawn, by fork and by a fork server; each tells what it ran in the report."""
    code = f"import multiprocessing, sys\n{PROGRAM}".replace("sys.argv[1]", repr(net)).replace(
        "session = ", "def work():\n  session = "
    )
    code = code.replace("\nx = ", "\n  x = ").replace("\nprint", "\n  print") + (
        'if __name__ == "__main__":\n'
        '  for how in ("spawn", "fork", "forkserver"):\n'
        "    child = multiprocessing.get_context(how).Process(target=work)\n"
        "    child.start()\n    child.join()\n    assert child.exitcode == 0\n"
    )
    (tmp_path / "parent.py").write_text(code)
    report = tmp_path / "report.json"
    found, _ = execute(sys.executable, tmp_path / "parent.py", options=("--report", str(report)))
    assert found == ["driver.dropin.onnxruntime", expected] * 3
    assert len(json.loads(report.read_text())["processes"]) == 3


@pytest.mark.integration
@pytest.mark.parametrize("version", ["0.0.1", ""])
def test_another_version_of_burst_leaves_the_program_alone(home, program, net, expected, version):
    """With one line on standard error; where the variable is empty, with none."""
    environment = os.environ | {"PYTHONPATH": STARTUP, "BURST_EXEC": version and f"{version} onnxruntime"}
    command = [sys.executable, str(program), net]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    assert ended.stdout.split() == ["onnxruntime.capi.onnxruntime_inference_collection", expected]
    assert len(ended.stderr.splitlines()) == (1 if version else 0)


@pytest.mark.integration
@pytest.mark.parametrize(
    "use",
    [
        "import onnxruntime; Mine = type('Mine', (onnxruntime.InferenceSession,), {}); session = Mine(path)",
        "from onnxruntime import InferenceSession as S; session = S(path)",
        "from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession as S; session = S(path)",
        "import importlib; session = importlib.import_module('onnxruntime').InferenceSession(path)",
        "import onnxruntime.capi; import onnxruntime as o; session = o.InferenceSession(path_or_bytes=path)",
    ],
)
def test_however_a_program_comes_to_the_class(home, net, expected, use):
    """It subclasses it, or imports it from where the real package keeps it; it checks what it is."""
    code = (
        f"import sys, numpy as np; path = sys.argv[1]; {use}\n"
        "import onnxruntime as o\n"
        "x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)\n"
        "assert isinstance(session, o.InferenceSession) and o.__version__ and session._burst_exec.device is not None\n"
        "print(session.run(None, {'x': x})[0].tobytes().hex())"
    )
    assert execute(sys.executable, "-c", code, net)[0] == [expected]


@pytest.mark.integration
def test_a_program_that_ends_as_it_likes():
    """Its exit status is the command's, and a program that imports no runtime imports nothing of ours."""
    code = "import sys; sys.exit(7 if not {'driver', 'numpy'} & set(sys.modules) else 1)"
    command = [sys.executable, "-m", "burst_engine", "exec", "--", sys.executable, "-c", code]
    assert subprocess.run(command, check=False, timeout=300).returncode == 7


@pytest.mark.integration
def test_a_command_that_is_not_there():
    """Is a usage error that names it."""
    command = [sys.executable, "-m", "burst_engine", "exec", "--", "/no/such/program"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 2
    assert "/no/such/program: cannot be run: No such file" in ended.stderr


@pytest.mark.integration
def test_nothing_is_left_of_a_program_that_is_killed(place, net, kit):
    """The device follows it, whatever ended it."""
    code = (
        "import sys, onnxruntime; session = onnxruntime.InferenceSession(sys.argv[1])\n"
        "print('there', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-m", "burst_engine", "exec", "--", sys.executable, "-c", code, net]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"there\n"
        assert place.pids()
        program.kill()
    kit.until(lambda: not place.pids())


KILLED = """
import resource, signal, sys
from driver.dropin.report import tally
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, 50))
tally.count("net", "sessions")
"""


@pytest.mark.integration
def test_a_process_that_is_killed_while_it_reports_takes_no_other_report_along(tmp_path):
    """What others have written stays, and the next one adds itself."""
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"processes": []}))
    environment = os.environ | {"BURST_EXEC_REPORT": str(report)}
    whole = KILLED.replace("resource.setrlimit", "(lambda *_: None)")
    for code, ends, count in ((whole, 0, 1), (KILLED, -signal.SIGXFSZ, 1), (whole, 0, 2)):
        ended = subprocess.run([sys.executable, "-c", code], check=False, env=environment, timeout=300)
        assert ended.returncode == ends
        assert len(json.loads(report.read_text())["processes"]) == count


@pytest.mark.integration
def test_many_processes_report_at_once(tmp_path):
    """Each is there once; to what is no file they only write."""
    report = tmp_path / "report.json"
    whole = [sys.executable, "-c", KILLED.replace("resource.setrlimit", "(lambda *_: None)")]
    started = [subprocess.Popen(whole, env=os.environ | {"BURST_EXEC_REPORT": str(report)}) for _ in range(8)]
    assert [one.wait(300) for one in started] == [0] * 8
    assert {row["pid"] for row in json.loads(report.read_text())["processes"]} == {one.pid for one in started}
    subprocess.run(whole, check=True, env=os.environ | {"BURST_EXEC_REPORT": "/dev/null"}, timeout=300)
    assert not os.path.isfile("/dev/null")
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


LATE = {
    "in a thread that outlives the main one": (
        "import threading\n"
        "def work():\n  threading.main_thread().join()\n  run(made())\n"
        "made().run(None, {'x': x}); threading.Thread(target=work).start()"
    ),
    "at exit": "import atexit; made().run(None, {'x': x}); atexit.register(lambda: run(made()))",
    "in a destructor": (
        "class Kept:\n  def __del__(self): run(self.session)\n"
        "kept = Kept(); kept.session = made(); kept.session.run(None, {'x': x})"
    ),
}


@pytest.mark.integration
@pytest.mark.parametrize("when", LATE)
def test_sessions_while_the_program_ends(home, net, expected, when):
    """They are made and run as in a program without us."""
    code = (
        "import sys, os, numpy as np, onnxruntime as o\n"
        "path, write = sys.argv[1], os.write\n"
        "x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)\n"
        "def made(made=o.InferenceSession): return made(path, providers=['CPUExecutionProvider'])\n"
        "def run(session, x=x, write=write): write(1, session.run(None, {'x': x})[0].tobytes().hex().encode())\n"
    )
    found, error = execute(sys.executable, "-c", code + LATE[when], net)
    assert found == [expected], error
    assert "Traceback" not in error


@pytest.mark.integration
def test_all_that_is_said_is_ours(home, program, net, expected):
    """A device that runs no files is said to, and a limit for which it is started apart; each line has our name."""
    found, error = execute(sys.executable, program, net, options=("--device", "reference"))
    assert found == ["driver.dropin.onnxruntime", expected]
    assert "device 'reference' runs no model files" in error
    few = 'ulimit -n 900; exec "$@"'
    found, other = execute("sh", "-c", few, "sh", sys.executable, program, net)
    assert found == ["driver.dropin.onnxruntime", expected]
    for lines in (error, other):
        assert all(line.startswith("burst exec: ") for line in lines.splitlines())
