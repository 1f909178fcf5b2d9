"""The generated scene: the same film for the same seed, and a truth that fits what is drawn."""

import numpy as np
import pytest

from driver.demos.boxes import Agreement, Box, overlap
from driver.demos.scene import CEILING, FLOOR, NAMES, NOISE_LIMIT, OUTLINES, Scene, Thing

pytestmark = pytest.mark.integration


def put(scene, *things):
    """These are what moves in it, and nothing else."""
    scene._things = list(things)


def things_of(scene):
    return scene._things


def picture(scene):
    frame = np.empty((scene.height, scene.width, 3), np.uint8)
    return frame, scene.render(frame)


def thing(name, **changes):
    still = {"x": 160.0, "y": 120.0, "dx": 0.0, "dy": 0.0, "radius": 40.0, "angle": 0.4, "spin": 0.0, "pulse": 0.0}
    look = {"colour": np.array([230, 20, 20], np.float32), "soft": 1.5, "rest": 0, "life": 1000}
    return Thing(**{"name": name} | still | look | changes)


@pytest.fixture
def empty():
    """Return a small scene without objects."""
    scene = Scene(3, width=320, height=240)
    put(scene)
    return scene


def test_same_seed_same_film():
    """Two scenes with one seed draw the same frames and tell the same truth."""
    one, other = Scene(7, 320, 240), Scene(7, 320, 240)
    for _ in range(5):
        frame, truth = picture(one)
        again, same_truth = picture(other)
        np.testing.assert_array_equal(frame, again)
        assert truth == same_truth


def test_other_seed_other_film():
    """Another seed draws something else."""
    assert not np.array_equal(picture(Scene(1, 320, 240))[0], picture(Scene(2, 320, 240))[0])


def test_advance_moves_objects_without_drawing():
    """A frame that nobody draws still lets time pass: the objects are where they would be."""
    watched, skipped = Scene(4, 320, 240), Scene(4, 320, 240)
    for _ in range(9):
        picture(watched)
    skipped.advance(9)
    assert picture(watched)[1] == picture(skipped)[1]


@pytest.mark.parametrize("name", NAMES)
def test_box_covers_exactly_the_drawn_pixels(empty, name):
    """The true box of each shape is the smallest one around the pixels that the shape changed by at least half."""
    put(empty, thing(name))
    truth = picture(empty)[1]
    rows, columns, opaque = things_of(empty)[0].cover(empty.width, empty.height)
    inked = np.zeros((240, 320), bool)
    inked[rows, columns] = opaque > 0.5
    y, x = np.nonzero(inked)
    assert truth == [Box(name, x.min(), y.min(), x.max() + 1, y.max() + 1)]


@pytest.mark.parametrize("name", NAMES)
def test_shape_is_drawn_within_its_box(empty, name):
    """A frame with an object differs from the same frame without it just within the object's box."""
    bare = Scene(3, width=320, height=240)
    put(bare)
    put(empty, thing(name))
    frame, (box,) = picture(empty)
    y, x = np.nonzero(np.abs(frame.astype(int) - picture(bare)[0]).max(axis=2) > 60)
    assert x.size > 300
    np.testing.assert_allclose([x.min(), y.min(), x.max() + 1, y.max() + 1], box.corners, atol=3)


def test_hidden_object_is_not_part_of_the_truth(empty):
    """An object behind a larger one has no box; the one in front has."""
    put(empty, thing("star", radius=30.0), thing("square", radius=60.0))
    assert [box.name for box in picture(empty)[1]] == ["square"]


def test_box_is_cut_at_the_frame(empty):
    """Of an object that leaves the frame, the box covers what is left."""
    put(empty, thing("disc", x=32.0))
    (box,) = picture(empty)[1]
    assert box.x0 == 0
    assert box.x1 < 32 + 40 + 2


def test_objects_stay_and_the_background_changes():
    """Over a minute every object's box stays inside the frame, and the background never stands still."""
    scene = Scene(11, 320, 240)
    last, _ = picture(scene)
    for _ in range(60):
        scene.advance(29)
        frame, truth = picture(scene)
        assert truth
        assert all(0 <= b.x0 < b.x1 <= 320 and 0 <= b.y0 < b.y1 <= 240 for b in truth)
        assert np.mean(np.abs(frame.astype(int) - last)) > 2
        last = frame


def test_layers_leave_room_for_noise():
    """Light, textures and noise add up within a byte, so that nothing wraps around."""
    scene = Scene(5, 320, 240)
    layers = [layer.astype(int) for layer in scene._layers]
    assert min(layer.min() for layer in layers) >= 0
    assert layers[0].min() >= FLOOR
    assert sum(layer.max() for layer in layers) <= CEILING
    assert abs(scene._noise.view(np.int8).astype(int)).max() <= NOISE_LIMIT


def test_wrong_frame_is_refused():
    """A frame of another shape or type is refused with what to pass instead."""
    with pytest.raises(ValueError, match=r"out is float32 .*pass uint8 \(480, 640, 3\)"):
        Scene(0).render(np.empty((480, 640, 3), np.float32))


def test_every_class_has_an_outline():
    """The classes that the detector knows are the shapes that the scene draws."""
    assert set(OUTLINES) == set(NAMES)


def test_overlap_is_intersection_over_union():
    """Half of a box shifted by half of its width shares a third of the union; boxes apart share nothing."""
    shared = overlap(np.array([[0, 0, 10, 10.0]]), np.array([[0, 0, 10, 10.0], [5, 0, 15, 10], [20, 20, 30, 30]]))
    np.testing.assert_allclose(shared, [[1, 1 / 3, 0]])


def test_agreement_counts_hits_misses_and_false_alarms():
    """A second box on one object is a false alarm, a box of the wrong class is one and a miss."""
    disc, star = Box("disc", 0, 0, 10, 10), Box("star", 50, 50, 70, 70)
    found = [Box("disc", 0, 0, 10, 9, 0.9), Box("disc", 0, 0, 9, 10, 0.5), Box("ring", 50, 50, 70, 70, 0.8)]
    agreement = Agreement()
    agreement.count(found, [disc, star])
    assert (agreement.hits, agreement.false_alarms, agreement.misses) == (1, 2, 1)
    assert agreement.precision == pytest.approx(1 / 3)
    assert agreement.recall == pytest.approx(1 / 2)
