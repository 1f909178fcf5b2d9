"""Compiles the C test programs: `build(program, *sources, flags=, sources=, …)` returns a function that runs one."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


@pytest.fixture
def csrc():
    """Where the sources of the core are."""
    return CSRC


class Compiler:
    """Compiles each text once with the same flags: programs share objects, and a mutant only differs in one."""

    def __init__(self, folder):
        self._folder, self._objects = folder, {}

    def object(self, path, *command):
        """The object file, and what the compiler said."""
        key = path.name, path.read_text(), command
        if key not in self._objects:
            target = self._folder / f"{len(self._objects)}-{path.stem}.o"
            self._objects[key] = target, told(*command, "-c", path, "-o", target)
        return self._objects[key]


def told(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    """What has been compiled."""
    return Compiler(tmp_path_factory.mktemp("objects"))


@pytest.fixture
def build(tmp_path, compiler):
    """Compiles with warnings as errors; the program's exit status and output are checked by whoever runs it."""

    def make(program, *files, flags=(), sources=None, optimise="-O1", cc="cc", runner=()):
        replaced = sources or {}
        for file, text in replaced.items():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
        binary = tmp_path / "program"
        assert shutil.which(cc), f"no C compiler '{cc}'; install one (Debian: apt install gcc libc6-dev)"
        command = [cc, "-std=gnu11", optimise, "-g", "-Wall", "-Wextra", f"-I{CSRC}", f"-I{HERE}", *flags]
        objects = []
        for path in (*((tmp_path if file in replaced else CSRC) / file for file in files), HERE / program):
            found, said = compiler.object(path, *command)
            assert tmp_path in path.parents or not said, said
            objects.append(found)
        told(*command, *objects, "-o", binary, "-pthread")
        return lambda *arguments, **how: run(*runner, binary, *arguments, **how)

    return make


def run(*command, timeout=500, fails=False):
    """Its output, stderr included; it must succeed, or fail when that is what is claimed. `fails` None: either."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    out = done.stdout + done.stderr
    assert fails is None or (done.returncode != 0) == fails, f"exit status {done.returncode}\n{out[-8000:]}"
    return out
