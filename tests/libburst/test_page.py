"""docs/howto/c.md: its programs, as they stand there, compile without a warning and print what they should."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from libburst_by_ctypes import ROOT

pytestmark = pytest.mark.integration
PAGE = (ROOT / "docs/howto/c.md").read_text()
NEGATED = "-0 -1 -2 -3\n"
COMMANDS = re.findall(r"^```sh\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def block(language):
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture
def shell(installed, tmp_path):
    """Runs a command in a folder of its own; what it prints."""
    library = {"PKG_CONFIG_PATH": f"{installed}/lib/pkgconfig", "LD_LIBRARY_PATH": f"{installed}/lib"}

    def run(command):
        how = {"cwd": tmp_path, "env": os.environ | library, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-ec", command], timeout=500, check=False, **how)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return run


def test_the_program_in_c(shell, tmp_path):
    """By the page's own line, as it is printed, and with more warnings."""
    (tmp_path / "program.c").write_text(block("c"))
    _, command = COMMANDS
    assert shell(command) == NEGATED
    shell(command.partition(" && ")[0].replace("-Wextra", "-Wextra -Wpedantic -Werror"))


@pytest.mark.parametrize("more", ["", "-fno-exceptions", "-static-libstdc++ -O2"])
def test_the_program_in_cpp(shell, tmp_path, more):
    """With exceptions, and without."""
    (tmp_path / "program.cpp").write_text(block("cpp"))
    flags = f"-std=c++17 -Wall -Wextra -Wpedantic -Werror {more}"
    assert shell(f"c++ {flags} program.cpp $(pkg-config --cflags --libs libburst) -o program && ./program") == NEGATED


def test_a_static_program(shell, installed, tmp_path):
    """With libburst.a in it, it needs no libburst.so."""
    (tmp_path / "program.c").write_text(block("c"))
    archive = "$(pkg-config --variable=libdir libburst)/libburst.a"
    shell(f"cc program.c $(pkg-config --cflags libburst) {archive} -pthread -o program")
    assert shell("env --unset=LD_LIBRARY_PATH ./program") == NEGATED


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.parametrize("name", ["libburst", "libfmq"])
def test_it_builds_without_a_warning(tmp_path, name, compiler):
    """Each library with either compiler, every file of it, shared and static."""
    command = ["make", "--silent", "-j2", f"BUILD={tmp_path}", f"CC={compiler}", "CFLAGS=-O1 -Werror"]
    done = subprocess.run(command, cwd=ROOT / "csrc" / name, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_dozen_lines_of_python(shell, tmp_path):
    """By ctypes: a model file is prepared."""
    program = block("python")
    assert len([line for line in program.splitlines() if line]) <= 12
    shutil.copy(ROOT / "tests/driver/importers/vendor/mobilenet_float32.tflite", tmp_path / "model.tflite")
    (tmp_path / "program.py").write_text(program)
    assert shell(f"{sys.executable} program.py") == "prepared\n"


def test_the_page_is_typed_as_it_is_printed(tmp_path):
    """From `make install` in a clone on: each command of the page, and each program by its name there."""
    (tmp_path / "program.c").write_text(block("c"))
    (tmp_path / "program.py").write_text(block("python"))
    shutil.copy(ROOT / "tests/driver/importers/vendor/mobilenet_float32.tflite", tmp_path / "model.tflite")
    install, run = COMMANDS
    install = install.replace("$HOME/.local\n", "$HOME/.local LIBRARIES_BUILD=$HOME/build\n", 1)
    name = f"/samples-{os.getpid()}"  # other tests may run beside this one
    (tmp_path / "queue.cpp").write_text(block(r"c\+\+").replace("/samples", name))
    lines = [
        *("set -e", "exec 3>&1 >&2", install, "cd ~", "exec >&3", run, "python3 program.py"),
        f"""python3 -c 'import fmq; fmq.MessageQueue.create("<f4", 1024, name="{name}").writer().write([1, 2.5, 3])'""",
        "c++ -std=c++17 queue.cpp $(pkg-config --cflags --libs libfmq) -o queue && ./queue",
        f"python3 -m fmq unlink {name} --force >/dev/null",
    ]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    how = {"cwd": ROOT, "env": os.environ | {"HOME": str(tmp_path), "PATH": path}, "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], timeout=300, check=False, **how)
    assert (done.returncode, done.stdout) == (0, f"{NEGATED}prepared\n1 2.5 3\n"), done.stderr
