"""`burst exec` below programs of all kinds: how they start, what they do to the class, and how they end."""

import os
import signal
import subprocess
import sys
import venv
import zipapp
from pathlib import Path

import onnxruntime as real
import pytest
from dropin_nets import CPU, feed

pytestmark = pytest.mark.integration

EXEC = [sys.executable, "-m", "burst_engine", "exec", "--"]
MAIN = """
import sys
import numpy as np
import onnxruntime

def main():
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    print(session._burst_exec.device is not None, session.run(None, {"x": x})[0].tobytes().hex())

if __name__ == "__main__":
    main()
"""

NAMED = MAIN.replace("session._burst_exec.device is not None", "type(session).__module__")
REAL = "onnxruntime.capi.onnxruntime_inference_collection"


@pytest.fixture
def expected(net):
    return real.InferenceSession(net, providers=CPU).run(None, feed())[0].tobytes().hex()


def ended(words, **more):
    """What a command printed on both streams."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout.split(), done.stderr


def module(folder):
    (folder / "app.py").write_text(MAIN)
    return [sys.executable, "-m", "app"]


def package(folder):
    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(MAIN)
    return [sys.executable, "-m", "app"]


def zipped(folder):
    package(folder)
    zipapp.create_archive(folder / "app", folder / "app.pyz", interpreter=sys.executable)
    return [str(folder / "app.pyz")]


def script(folder):
    (folder / "app").write_text(f"#!{sys.executable}\n{MAIN}")
    (folder / "app").chmod(0o700)
    return [str(folder / "app")]


def shell(folder):
    return ["sh", "-c", f'exec {" ".join(script(folder))} "$1"', "sh"]


def safe_path(folder):
    return [sys.executable, "-P", "-s", "-B", "-u", *script(folder)]


@pytest.mark.parametrize("start", [module, package, zipped, script, shell, safe_path])
def test_however_a_program_starts(home, net, expected, tmp_path, start):
    """Its models are in the device."""
    assert ended([*EXEC, *start(tmp_path), net], cwd=tmp_path) == (["True", expected], "")


@pytest.mark.parametrize("options", ["-I", "-S", "-E", "-bsI"])
@pytest.mark.parametrize("is_script", [False, True])
def test_a_python_that_ignores_its_environment(home, net, expected, tmp_path, options, is_script):
    """The program runs as without us, and one line says so."""
    text = NAMED.replace("import sys\n", f"import sys\nsys.path += {sys.path}\n", 1)  # -S has no site-packages
    (tmp_path / "app").write_text(f"#!{sys.executable} {options}\n{text}")
    (tmp_path / "app").chmod(0o700)
    command = [str(tmp_path / "app")] if is_script else [sys.executable, options, str(tmp_path / "app")]
    found, error = ended([*EXEC, *command, net])
    assert found == [REAL, expected]
    (line,) = error.splitlines()
    assert line.startswith(f"burst exec: {command[0]}: ")
    assert f" -{options[-1]} " in line


def test_an_environment_without_burst(home, net, expected, tmp_path):
    """As tools have one each: the program runs as without us, and one line says so."""
    venv.create(tmp_path / "env", with_pip=False)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for name in ("numpy", "numpy.libs", "onnxruntime"):
        (site / name).symlink_to(Path(real.__file__).parents[1] / name)
    (tmp_path / "app.py").write_text(NAMED)
    found, error = ended([*EXEC, str(tmp_path / "env/bin/python"), str(tmp_path / "app.py"), net])
    assert found == [REAL, expected]
    (line,) = error.splitlines()
    assert line.startswith("burst exec: onnxruntime runs in this process: ")
    assert "has no Burst" in line


CHANGES = {
    "a method is wrapped": """
run = onnxruntime.InferenceSession.run
def wrapped(self, *given, **more):
    return run(self, *given, **more)
onnxruntime.InferenceSession.run = wrapped
""",
    "its making is wrapped": """
import functools
init = onnxruntime.InferenceSession.__init__
@functools.wraps(init)
def wrapped(self, path, *given, **more):
    self.path = path
    init(self, path, *given, **more)
onnxruntime.InferenceSession.__init__ = wrapped
""",
    "the class is replaced": """
class Named(onnxruntime.InferenceSession):
    __slots__ = ()
    def run(self, *given, **more):
        return super().run(*given, **more)
onnxruntime.InferenceSession = Named
""",
    "a function makes it": """
Real = onnxruntime.InferenceSession
onnxruntime.InferenceSession = lambda path, **more: Real(path, **more)
""",
    "it is loaded again": """
import importlib
importlib.reload(onnxruntime)
""",
    "it is imported anew": """
for name in [name for name in sys.modules if name.split(".")[0] == "onnxruntime" and "pybind" not in name]:
    del sys.modules[name]
import onnxruntime
""",
    "the version is compared": """
import importlib.metadata
assert tuple(map(int, onnxruntime.__version__.split(".")[:2])) >= (1, 20)
assert importlib.metadata.version("onnxruntime") == onnxruntime.__version__ == onnxruntime.get_version_string()
assert onnxruntime.__spec__.origin == onnxruntime.__file__ and onnxruntime.__loader__.is_package("onnxruntime")
""",
    "its source is read": """
import inspect, pkgutil
assert "class InferenceSession" in inspect.getsource(inspect.getmodule(onnxruntime.InferenceSession))
assert pkgutil.get_data("onnxruntime", "LICENSE") and inspect.getdoc(onnxruntime.InferenceSession.run)
""",
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_a_program_does_to_the_class(home, net, expected, tmp_path, change):
    """Its models are in the device all the same."""
    (tmp_path / "app").write_text(MAIN.replace("\ndef main", f"{CHANGES[change]}\ndef main", 1))
    assert ended([*EXEC, sys.executable, str(tmp_path / "app"), net]) == (["True", expected], "")


WAITING = """
import os, signal, sys
import onnxruntime
signal.signal(signal.SIGINT, signal.default_int_handler)
session = onnxruntime.InferenceSession(sys.argv[1])
print("there", flush=True)
if sys.argv[2:]:
    os._exit(5)
sys.stdin.read()
"""
ENDS = {"Ctrl-C": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP, "SIGKILL": signal.SIGKILL}


@pytest.mark.parametrize("end", [*ENDS, "os._exit"])
def test_nothing_is_left_of_a_program(place, net, kit, end):
    """Its status is its own, and the device follows it: the terminal's signals go to all of the group."""
    words = [*EXEC, sys.executable, "-c", WAITING, net, *(["now"] if end not in ENDS else [])]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, start_new_session=True, **pipes) as program:
        assert program.stdout.readline() == b"there\n"
        if end in ENDS:
            assert place.pids()
            os.killpg(program.pid, ENDS[end])
        program.stdout.read()
        assert program.wait() == (-ENDS[end] if end in ENDS else 5)
    kit.until(lambda: not place.pids())


INTERRUPTED = """
import os, signal, sys, threading
import numpy as np
import onnxruntime
signal.signal(signal.SIGINT, signal.default_int_handler)
feed = {"x": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}
session = onnxruntime.InferenceSession(sys.argv[1])
expected, seen = session.run(None, feed)[0].tobytes(), 0
for n in range(10):
    try:
        threading.Timer(0.005 * n, lambda: os.killpg(0, signal.SIGINT)).start()
        while True:
            assert session.run(None, feed)[0].tobytes() == expected
    except KeyboardInterrupt:
        seen += 1
print(session._burst_exec.device is not None, seen, session.run(None, feed)[0].tobytes().hex())
"""


def test_a_program_that_goes_on_after_ctrl_c(home, net, expected):
    """Ten times in the middle of runs: it runs on, in the device."""
    words = [*EXEC, sys.executable, "-c", INTERRUPTED, net]
    assert ended(words, start_new_session=True)[0] == ["True", "10", expected]
