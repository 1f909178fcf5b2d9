"""By which name tools call a model, and what `driver.compile` takes as one."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import driver
from driver.cli.command import burst as command
from driver.demos import EDGES
from driver.monitor import Watcher


@pytest.fixture
def night_vision(tmp_path):
    """A model file of that name."""
    file = tmp_path / "night_vision.onnx"
    file.write_bytes(EDGES.read_bytes())
    return file


def names_of_bursts():
    """The models that `burst top` names."""
    return {burst.model for burst in Watcher().sample().bursts}


@pytest.mark.parametrize("as_type", [str, Path])
def test_a_path_is_loaded_and_the_model_has_the_files_name(home, night_vision, as_type):
    """`driver.compile(path)`: the file's own runtime runs it, and `burst top` calls it by the file's name."""
    with driver.compile(as_type(night_vision)) as compiled, compiled.burst() as burst:
        burst.run()
        assert "night_vision.onnx" in names_of_bursts()


def test_a_program_names_its_models(home, night_vision, kit):
    """`name=` is the name of the file's form and of the operations' form, and of a model that comes from no file."""
    with (
        driver.compile(night_vision, name="the yard") as file,
        driver.compile(night_vision, name="the gate", device="reference") as operations,
        driver.compile(kit.add_model(), name="sum", device="reference") as built,
        file.burst(),
        operations.burst(),
        built.burst(),
    ):
        assert names_of_bursts() >= {"the yard", "the gate", "sum"}


def test_the_cache_lists_names(home, night_vision, tmp_path, monkeypatch):
    """`burst cache list` says which file an entry was made of."""
    with driver.compile(night_vision, cache_dir=tmp_path / "kept"):
        pass
    done = CliRunner().invoke(command, ["cache", "list", "--dir", str(tmp_path / "kept"), "--json"])
    assert "night_vision.onnx" in done.output, done.output
    assert json.loads(done.output)


def test_a_tilde_is_the_home_and_true_the_folder_of_burst_cache(home, night_vision, tmp_path, monkeypatch):
    """`cache_dir="~/kept"` makes no folder of that name, and `cache_dir=True` keeps where `burst cache` looks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    for folder in ("~/kept", True):
        with driver.compile(night_vision, cache_dir=folder):
            pass
    assert not (tmp_path / "~").exists()
    assert any((tmp_path / "kept").iterdir())
    assert "night_vision.onnx" in CliRunner().invoke(command, ["cache", "list"]).output


@pytest.mark.parametrize("what", [7, None, driver.ModelBuilder()])
def test_what_is_no_model_is_told_what_makes_one(what):
    """Neither a model nor a path: TypeError with driver.load and driver.ModelBuilder."""
    with pytest.raises(TypeError, match=r"driver\.load\(path\) .* driver\.ModelBuilder\(\)\.build\(\)"):
        driver.compile(what)


def test_a_device_takes_no_path(device):
    """`prepare` of one device says that driver.load makes a model of it."""
    with pytest.raises(TypeError, match=r"model='net\.onnx': a driver\.Model; driver\.load"):
        device.prepare("net.onnx")


@pytest.mark.parametrize("name", ["", 7, "a\nb", "\x1b[31m"])
def test_a_name_is_printable_text(kit, name):
    """Anything else is refused with the name."""
    with pytest.raises(ValueError, match="name="):
        driver.compile(kit.add_model(), name=name)
