"""The detector: its weights are small and good, and decode() reads the network's answers rightly."""

import numpy as np
import pytest

from driver.demos.boxes import Agreement
from driver.demos.detector import CELL, FRAME, GRID, OUTPUTS, WEIGHTS, build_model, decode
from driver.demos.scene import NAMES, Scene
from driver.nn import Interpreter

pytestmark = pytest.mark.integration

UNSEEN_SCENE = 3_000_000  # far from the seeds that train_detector.py trains and checks on


def answers(*planted):
    """Return outputs in which each (class, row, column, score, reach in cells) is the middle of an object."""
    heat, edges = np.zeros((1, *GRID, len(NAMES)), np.float32), np.full((1, *GRID, 4), 2.0, np.float32)
    for name, row, column, score, reach in planted:
        heat[0, row, column, NAMES.index(name)] = score
        edges[0, row, column] = reach
    return heat, edges


def test_planted_peak_becomes_a_box():
    """One hot cell becomes one box of its class, around the middle of the cell, as far as the edges say."""
    (box,) = decode(answers(("star", 10, 20, 0.8, (1, 2, 3, 4))))
    x, y = (20 + 0.5) * CELL, (10 + 0.5) * CELL
    assert box.name == "star"
    assert box.corners == (x - CELL, y - 2 * CELL, x + 3 * CELL, y + 4 * CELL)
    assert box.score == pytest.approx(0.8)


def test_surest_box_comes_first():
    """Boxes come in the order of their scores."""
    found = decode(answers(("disc", 3, 3, 0.5, 1), ("ring", 20, 30, 0.9, 1), ("star", 10, 10, 0.7, 1)))
    assert [box.name for box in found] == ["ring", "star", "disc"]


def test_only_the_hottest_neighbour_is_a_middle():
    """Of neighbouring hot cells of one class only the hottest becomes a box."""
    (box,) = decode(answers(("disc", 10, 10, 0.8, 1), ("disc", 10, 11, 0.9, 1), ("disc", 11, 10, 0.7, 1)))
    assert box.score == pytest.approx(0.9)


def test_boxes_on_one_object_are_suppressed():
    """Two peaks of one class whose boxes nearly coincide are one object; two that overlap a little are two."""
    same = answers(("disc", 10, 10, 0.9, (3, 3, 3, 3)), ("disc", 10, 12, 0.8, (5, 3, 1, 3)))
    apart = answers(("disc", 10, 10, 0.9, (3, 3, 3, 3)), ("disc", 10, 14, 0.8, (3, 3, 3, 3)))
    assert len(decode(same)) == 1
    assert len(decode(apart)) == 2


def test_classes_may_overlap_further():
    """Half covered boxes of different classes both stay, as one object may lie on another; equal boxes do not."""
    on_top = answers(("disc", 10, 10, 0.9, (3, 3, 3, 3)), ("star", 10, 11, 0.8, (3, 3, 3, 3)))
    equal = answers(("disc", 10, 10, 0.9, (3, 3, 3, 3)), ("star", 10, 11, 0.8, (4, 3, 2, 3)))
    assert [box.name for box in decode(on_top)] == ["disc", "star"]
    assert [box.name for box in decode(equal)] == ["disc"]


def test_boxes_stay_in_the_frame():
    """Edges beyond the frame are cut at it."""
    (box,) = decode(answers(("cross", 0, 39, 0.9, (2, 2, 2, 2))))
    assert box.y0 == 0
    assert box.x1 == FRAME[2]


def test_cold_answers_find_nothing():
    """Without a peak there is no box."""
    assert decode(answers(("disc", 5, 5, 0.2, 1))) == []


def test_weights_are_small_and_say_where_they_come_from():
    """The weights are at most 1 MB and carry the command that made them."""
    assert WEIGHTS.stat().st_size <= 1_000_000
    with np.load(WEIGHTS) as file:
        assert str(file["command"]).startswith("python examples/train_detector.py ")


def test_network_finds_the_objects_of_scenes_it_never_saw():
    """On unseen scenes, through the reference interpreter, precision and recall are at least 0.9."""
    agreement, frame = Agreement(), np.empty(FRAME, np.uint8)
    outputs = [np.empty(shape, np.float32) for shape in OUTPUTS]
    network = Interpreter(build_model()).bind([frame], [output.reshape(-1).view(np.uint8) for output in outputs])
    for seed in range(UNSEEN_SCENE, UNSEEN_SCENE + 3):
        scene = Scene(seed)
        for _ in range(10):
            scene.advance(19)
            truth = scene.render(frame[0])
            network.run()
            agreement.count(decode(outputs), truth)
    assert agreement.precision >= 0.9
    assert agreement.recall >= 0.9
