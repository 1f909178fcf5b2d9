"""Other files called fmq, burst or driver: the import that fails, the command and the doctor name them.

The sources are copied to a folder that stands for site-packages; each program runs in a folder of the user's.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import burst_engine

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[1]
PACKAGES = ("burst_engine", "fmq", "burst", "driver")
FOREIGN = '"""Reads a tape."""\nSPEED = 3\n'
# An editable installation puts a finder before the path, where no ordinary one has something.
AS_INSTALLED = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[2])
"""


@pytest.fixture
def site(tmp_path):
    """A folder with our packages, extensions and all. What Python has compiled serves here, too."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    for package in ("burst_engine", "driver"):
        (folder / package).symlink_to(ROOT / package)
    for package in ("fmq", "burst"):
        shutil.copytree(ROOT / package, folder / package)
        for file in Path(importlib.util.find_spec(f"{package}._core").origin).parent.glob("*.so"):
            shutil.copy(file, folder / package)
    return folder


@pytest.fixture
def program(site, tmp_path):
    """Runs code in the user's folder, with the site-packages above behind it: what it printed, and its status."""
    folder = tmp_path / "mine"
    folder.mkdir()

    def run(code):
        command = [sys.executable, "-c", AS_INSTALLED + code, site, folder]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=60, check=False, env=os.environ
        )
        return done.stdout + done.stderr, done.returncode

    run.folder, run.site = folder, site
    return run


def install(site, name, *files):
    """What pip leaves of another distribution."""
    about = site / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (about / "RECORD").write_text("".join(f"{file},,\n" for file in files))


DOCTOR = "from driver.doctor import import_names; from dataclasses import asdict; import json\n"
DOCTOR += "print(json.dumps([asdict(finding) for finding in import_names.names()]))"
COMMAND = "sys.argv[1:] = ['--version']; runpy.run_module('burst_engine', run_name='__main__')"


@pytest.mark.parametrize("name", ["fmq", "burst"])
def test_an_import_names_the_file_that_shadows(program, name):
    """fmq.py or burst.py beside the program: `import driver` ends with an ImportError with its path and the remedy."""
    (program.folder / f"{name}.py").write_text(FOREIGN)
    said, status = program("import driver")
    assert status == 1
    assert f"ImportError: {program.folder}/{name}.py is imported in place of the package '{name}'" in said
    assert "rename that file" in said


@pytest.mark.parametrize("name", ["fmq", "burst", "driver"])
def test_an_import_from_burst_engine_is_ours_or_fails(program, name):
    """`from burst_engine import driver` is the package; where a driver.py shadows it, an ImportError names that."""
    code = f"from burst_engine import {name} as ours; import {name}; print(ours is {name})"
    assert program(code) == ("True\n", 0)
    (program.folder / f"{name}.py").write_text(FOREIGN)
    said, status = program(code)
    assert status == 1
    assert f"ImportError: {program.folder}/{name}.py is imported in place of the package '{name}'" in said


def test_burst_names_what_shadows_fmq(program):
    """A package fmq beside the program: `import burst` names its file."""
    (program.folder / "fmq").mkdir()
    (program.folder / "fmq/__init__.py").write_text(FOREIGN)
    said, status = program("import burst")
    assert status == 1
    assert f"{program.folder}/fmq/__init__.py is imported in place of the package 'fmq'" in said


@pytest.mark.parametrize("name", ["fmq", "burst", "driver"])
def test_the_command_names_the_file_that_shadows(program, name):
    """`burst`, also as `python -m burst_engine`, starts under a name of its own: it names even a driver.py, exit 2."""
    (program.folder / f"{name}.py").write_text(FOREIGN)
    said, status = program(COMMAND)
    assert status == 2
    assert said.startswith(f"Error: {program.folder}/{name}.py is imported in place of the package '{name}'")


def test_the_command_runs_where_nothing_shadows(program):
    """A namespace (a folder without __init__.py) and a file of another name do no harm."""
    (program.folder / "driver").mkdir()
    (program.folder / "drivers.py").write_text(FOREIGN)
    said, status = program(COMMAND)
    assert status == 0, said


def test_a_package_that_overwrote_ours_is_named(program):
    """Another distribution has written its __init__.py over burst's: the import names it and the remedy."""
    (program.site / "burst/__init__.py").write_text(FOREIGN)
    install(program.site, "tape-burst", "burst/__init__.py")
    said, status = program("import driver")
    assert status == 1
    assert f"{program.site}/burst/__init__.py is imported in place of" in said
    assert "pip let tape-burst write there, too" in said


def test_the_doctor_names_a_file_in_the_current_folder(program):
    """The doctor starts all the same, because it looks before programs of this folder do: a warning with the path."""
    (program.folder / "driver.py").write_text(FOREIGN)
    said, status = program("sys.path.remove(sys.argv[2])\n" + DOCTOR)
    assert status == 0, said
    (finding,) = json.loads(said)
    assert finding["state"] == "warning"
    assert finding["found"].startswith(f"{program.folder}/driver.py is imported in place of the package 'driver'")


def test_the_doctor_notes_what_is_hidden(program):
    """Our files over those of another distribution, and a file further down the path: notes, because ours work."""
    install(program.site, "tape-driver", "driver/__init__.py", "driver/tape.py")
    (program.folder / "fmq.py").write_text(FOREIGN)
    moved = "sys.path.remove(sys.argv[2]); sys.path.append(sys.argv[2]); import os; os.chdir('/')\n"
    said, status = program(moved + DOCTOR)
    assert status == 0, said
    findings = {finding["subject"]: finding for finding in json.loads(said)}
    assert {finding["state"] for finding in findings.values()} == {"note"}
    assert "the distribution 'tape-driver' is hidden by the package 'driver'" in findings["the name driver"]["found"]
    assert findings["the name fmq"]["found"].startswith(f"{program.folder}/fmq.py is hidden by")


def test_the_doctor_finds_nothing_on_an_ordinary_machine(program):
    """One line that says so."""
    said, status = program(DOCTOR)
    assert status == 0, said
    assert [finding["state"] for finding in json.loads(said)] == ["ok"]


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_packages_begin_as_they_are_recognised(package):
    """The first line of each __init__.py is what the check looks for."""
    from burst_engine.names import BEGINNINGS

    assert (ROOT / package / "__init__.py").read_text().startswith(BEGINNINGS[package])


@pytest.fixture
def clone(program):
    """The user's folder is a clone: our sources, and no module in C."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, program.folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (program.folder / "csrc").mkdir()
    return program.folder


@pytest.mark.parametrize("name", ["fmq", "driver"])
def test_a_program_in_a_clone_imports_what_is_installed(program, clone, name):
    """Where the sources are not built, each package is the installed one, whichever is imported first."""
    said, status = program(
        f"import {name}, fmq, burst, driver, burst_engine, importlib.resources\n"
        "for module in (fmq, burst, driver, burst_engine, fmq.queue, burst.wire, driver.nn):\n"
        "    assert module.__file__.startswith(sys.argv[1]), module\n"
        "print(str(importlib.resources.files('driver')).startswith(sys.argv[1]))"
    )
    assert (said, status) == ("True\n", 0)


@pytest.mark.parametrize("module", ["fmq", "driver.cli"])
def test_a_command_of_a_clone_is_the_installed_one(program, clone, module):
    """`python -m fmq` and `python -m driver.cli` run in the clone."""
    said, status = program(f"sys.argv[1:] = ['--help']; runpy.run_module('{module}', run_name='__main__')")
    assert status == 0, said
    assert said.startswith(("Usage:", "usage:"))


@pytest.mark.parametrize("name", PACKAGES)
def test_a_clone_that_nothing_is_installed_for_says_so(program, clone, name):
    """The import names the clone, why it cannot be used and the command that installs it."""
    shutil.rmtree(program.site)
    said, status = program(f"import {name}")
    assert status == 1
    assert f"ImportError: you stand in the clone {clone}, whose sources are not built" in said
    assert f"pip install {clone}" in said


def test_a_clone_of_other_sources_than_the_installed_ones_says_so(program, clone):
    """Sources of a clone are not mixed with the modules in C of another version: the import says where to stand, and
    the doctor warns.
    """
    with (clone / "fmq/__init__.py").open("a") as file:
        file.write("# a later commit\n")
    said, status = program("import fmq")
    assert status == 1
    assert f"the installed fmq ({program.site}/fmq/__init__.py) was made from other sources: keep your program" in said
    said, status = program("sys.path.remove(sys.argv[2])\n" + DOCTOR)
    assert status == 0, said
    finding = json.loads(said)[0]
    assert finding["state"] == "warning"
    assert "in another folder" in finding["remedy"]


def test_the_doctor_says_what_a_clone_imports(program, clone):
    """All is well, and the doctor says whose files a program in the clone runs."""
    said, status = program("sys.path.remove(sys.argv[2])\n" + DOCTOR)
    assert status == 0, said
    findings = json.loads(said)
    assert [finding["state"] for finding in findings] == ["ok", "ok"]
    assert findings[0]["found"] == f"{clone} is a clone; programs there import what is installed"


def test_a_frozen_application_is_left_alone(monkeypatch):
    """Its packages lie in an archive, which its author has filled: no file says whose they are."""
    monkeypatch.setattr("burst_engine.names.imposter", lambda name: burst_engine.Namesake(name, "archive", True, ""))
    with pytest.raises(ImportError, match="archive"):
        burst_engine.expect("fmq")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    burst_engine.expect("fmq")
