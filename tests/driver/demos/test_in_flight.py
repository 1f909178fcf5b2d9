"""Frames through a burst with several of them in flight."""

from itertools import islice

import pytest

from driver.demos.camera import connected
from driver.demos.camera_sources import Clock, open_source
from driver.demos.detector import build_model
from driver.demos.web.camera import watch_several

pytestmark = pytest.mark.integration

FRAMES = 12


@pytest.fixture(autouse=True)
def runtime(shared, monkeypatch):
    """The devices that all tests share."""
    shared.enter(monkeypatch)


def steps(depth, fps, size=(320, 240)):
    """What comes of the first frames of the scene, with the frames themselves."""
    with connected("reference", size, depth=depth) as detector:
        source = open_source("scene", 3, fps, size)
        for step in islice(watch_several(detector, source, Clock(fps), depth), FRAMES):
            yield step.index, step.frame.copy(), step.found, step.truth, set(step.calls)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_every_frame_gets_its_own_result_in_order(depth):
    """With any depth the same boxes are found in the same frames as one at a time."""
    found = list(steps(depth, fps=0))
    for (index, frame, boxes, truth, _), (n, expected, others, known, _) in zip(found, steps(1, fps=0), strict=True):
        assert index == n
        assert (frame == expected).all()
        assert (boxes, truth) == (others, known)


def test_the_plain_path_gets_frames_while_nothing_else_is_in_flight():
    """With time to spare that is every frame; in a hurry, with four in flight, it is none."""
    assert [calls for *_, calls in steps(4, fps=15)] == [{"burst", "plain RPC"}] * FRAMES
    assert [calls for *_, calls in steps(4, fps=0)] == [{"burst"}] * FRAMES


@pytest.mark.parametrize("size", [(0, 480), (640, 470), (648, 480), (-16, 16)])
def test_a_size_that_is_not_in_whole_cells_is_refused(size):
    """With both sides and the remedy."""
    with pytest.raises(ValueError, match=f"width={size[0]}, height={size[1]}: both in whole cells of 16"):
        build_model(*size)
