"""`burst demo camera --web --model FILE`: what the page gets of a model of one's own."""

import itertools
from contextlib import closing

import click
import pytest

from driver.cli.live_model import ModelShow
from driver.demos import EDGES
from driver.demos.web.settings import Values
from driver.demos.web.stream import Stage


@pytest.fixture
def show(shared, monkeypatch, tmp_path):
    """show(path, …): a show of that file, with devices that other tests use, too."""
    shared.enter(monkeypatch)
    return lambda path, device=None, labels=None: ModelShow(
        path, "scene", 0, 30, device=device, out=tmp_path, labels=labels
    )


def updates(show, said, count, **changes):
    """The first of what it yields, by the settings that the page begins with, and changes."""
    values = Values(show.settings)
    values.change(changes)
    with closing(show.play(values.held(), Stage(lambda **facts: said.append(facts)))) as found:
        return list(itertools.islice(found, count))


@pytest.mark.parametrize("device", ["reference", None])
def test_the_page_gets_frames_calls_and_answers(show, device):
    """A picture of each frame, a call on both paths, and what the model answers in words; it says where it runs."""
    made, said = show(EDGES, device), []
    for update in updates(made, said, 3, size="320x240"):
        assert update.picture.startswith(b"\xff\xd8")
        assert (update.facts["size"], update.facts["found"]) == ([320, 240], [])
        (words,) = update.facts["said"]
        assert words.startswith("edges")
        assert update.point["calls"].keys() == {"burst", "plain RPC"}
        assert update.point["calls"]["burst"][1] is not None
    places = [facts["place"]["device"] for facts in said if facts.get("place")]
    assert places == [device or "onnxruntime"]
    assert "depth" not in {setting.name for setting in made.settings}


def test_labels_name_the_classes(show, files, tmp_path):
    """Of an output that is a row of as many scores; a frame of another size is fitted anew."""
    labels = tmp_path / "labels.txt"
    labels.write_text("".join(f"class {n}\n" for n in range(20)))
    made = show(files.floats, labels=labels)
    for size in ("320x240", "640x480"):
        (update,) = updates(made, [], 1, size=size)
        assert update.facts["said"][0].count("class ") == 3


def test_a_model_of_something_else_is_refused(show, files):
    """With what it takes."""
    with pytest.raises(click.UsageError, match=r"models of one image, and this takes "):
        show(files.two)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--model", EDGES), "--web"),
        (("--web", "--labels", EDGES), "--model"),
        (("--web", "--model", "/nonexistent.onnx"), "/nonexistent.onnx"),
    ],
)
def test_what_makes_no_sense_is_refused(command, words, told):
    """In a line that names the option."""
    assert told in command("demo", "camera", *words, ends=2).err
