"""Which outputs a type has, and what they mean."""

import numpy as np
import pytest
from frigate_models import NAMES, SIZE, frame_of, outputs_for, rows_for, write_detector

from driver.errors import DeviceFailed
from driver.gateways.frigate import FrameDetector, WrongFrame
from driver.gateways.frigate.boxes import FoundBoxes
from driver.gateways.frigate.model_types import TYPES

SHAPE = (1, 3, SIZE, SIZE)


@pytest.fixture(scope="module")
def detectors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: FrameDetector(write_detector(folder / f"{name}.onnx", name), name) for name in NAMES}


def boxes(count, score=0.9):
    """As many that do not overlap, in a row."""
    left = np.arange(count, dtype=np.float32) / count
    corners = np.stack([left, np.zeros(count), left + 0.5 / count, np.ones(count)], axis=1).astype(np.float32)
    return FoundBoxes(corners, np.full(count, score, np.float32), np.arange(count))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pixel", [0.0, 0.5])
def test_known_boxes(detectors, name, pixel):
    """Each type's outputs become the boxes that are in them, the surest first, and rows of zeros behind them."""
    np.testing.assert_allclose(detectors[name].rows(outputs_for(name, pixel), SHAPE), rows_for(pixel), atol=1e-6)


def test_one_output_of_an_ssd(detectors):
    """OpenVINO's form: rows of image, class, score and corners, which end at an image of -1."""
    out = np.full((1, 1, 5, 7), -1, np.float32)
    for row, its in zip(out[0, 0], rows_for(0.5)[:3], strict=False):
        row[:] = [0, its[0], its[1], its[3], its[2], its[5], its[4]]
    out[0, 0, 4] = [0, 1, 0.99, 0, 0, 1, 1]  # behind the end
    np.testing.assert_allclose(detectors["ssd"].rows([out], SHAPE), rows_for(0.5), atol=1e-6)


def test_three_grids_with_anchors(detectors):
    """YOLOv4 and v7: each cell says where within itself, and how much of its anchor."""
    outputs = [np.zeros((1, 3 * 8, SIZE // s, SIZE // s), np.float32) for s in (8, 16, 32)]
    outputs[1][0, 8 + 0, 2, 1] = 0.5  # second anchor, 76 x 55, in the cell 1, 2 of 16 pixels: its middle
    outputs[1][0, 8 + 1, 2, 1] = 0.5
    outputs[1][0, 8 + 2 : 8 + 4, 2, 1] = 0.25
    outputs[1][0, 8 + 4 : 8 + 8, 2, 1] = [0.9, 0.1, 0.2, 0.8]
    found = detectors["yolo-generic"].rows(outputs, SHAPE)
    half = np.array([76, 55]) / 8
    corners = np.array([40 - half[1], 24 - half[0], 40 + half[1], 24 + half[0]]) / SIZE
    np.testing.assert_allclose(found[0], [2, 0.72, *corners], atol=1e-6)
    assert not found[1:].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", NAMES)
def test_a_model_that_is_not_of_the_type(detectors, name, other):
    """Is refused with its outputs, the outputs of the type, and the type that it has."""
    if name == other:
        detectors[name].approve(outputs_for(name, 0.0))
        return
    with pytest.raises(DeviceFailed, match=rf"is no {name}: its outputs are .*; (say --model-type|export it)") as told:
        detectors[name].approve(outputs_for(other, 0.0))
    if TYPES[name].inputs == TYPES[other].inputs:
        assert str(told.value).endswith(f"say --model-type {other}")


@pytest.mark.parametrize(
    ("path", "model_type", "told"),
    [
        ("ssd.onnx", "ssd300", "model type 'ssd300': there are ssd, yolonas"),
        ("none.onnx", "ssd", "there is no such file"),
        ("dfine.onnx", "ssd", "of type ssd takes 1, one of which is a frame"),
        ("ssd.onnx", "dfine", "of type dfine takes 2"),
    ],
)
def test_what_cannot_be_a_detector(detectors, path, model_type, told):
    """Types that are not there, files that are not there, and models of other inputs."""
    with pytest.raises(DeviceFailed, match=told):
        FrameDetector(detectors["ssd"].path.with_name(path), model_type)


@pytest.mark.parametrize(
    ("shape", "dtype", "told"),
    [
        (SHAPE, "uint8", "set model.input_dtype to float "),
        (SHAPE, "float64", "set model.input_dtype to float "),
        ((1, SIZE, SIZE, 3), "float32", "set model.width to 64, model.height to 64 and model.input_tensor to nchw"),
        ((1, 3, 32, 32), "float32", "set model.width to 64"),
        ((2, 3, SIZE, SIZE), "float32", "set model.width to 64"),
        ((3, SIZE, SIZE), "float32", "set model.width to 64"),
    ],
)
def test_frames_that_it_does_not_take(detectors, shape, dtype, told):
    """It says what to change in Frigate's configuration."""
    detectors["ssd"].check(SHAPE, "float32")
    with pytest.raises(WrongFrame, match=told):
        detectors["ssd"].check(shape, dtype)


def test_the_size_of_a_frame_is_a_models_second_input(detectors):
    """Which takes width and height, in its own type."""
    frame, size = detectors["dfine"].inputs(frame_of(0))
    assert frame.shape == SHAPE
    assert size.dtype == np.int64
    np.testing.assert_array_equal(size, [[SIZE, SIZE]])


def test_no_more_than_twenty():
    """The surest twenty of many; none below Frigate's threshold."""
    found = boxes(40)._replace(scores=np.linspace(0.3, 0.99, 40, dtype=np.float32)).rows()
    assert found.shape == (20, 6)
    assert list(found[:, 0]) == list(range(39, 19, -1))
    assert not boxes(5, score=0.39).rows().any()


def test_what_overlaps_is_one_object():
    """Of boxes that overlap the surest is left, whatever their classes; not so if the model has seen to that."""
    near = np.array([[0, 0, 0.5, 0.5], [0.05, 0, 0.55, 0.5], [0.6, 0.6, 1, 1]], np.float32)
    found = FoundBoxes(near, np.array([0.7, 0.9, 0.8], np.float32), np.array([1, 2, 3]))
    assert list(found.rows()[:4, 0]) == [2, 3, 0, 0]
    assert list(found._replace(is_final=True).rows()[:4, 0]) == [2, 3, 1, 0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["scores", "corners"])
def test_what_is_no_number_is_an_error(wrong, where):
    """A model that answers NaN has not seen nothing."""
    found = boxes(3)
    getattr(found, where)[1] = wrong
    with pytest.raises(ValueError, match="no finite numbers"):
        found.rows()


@pytest.mark.parametrize("name", ["yolo-generic", "yolox"])
def test_scores_that_are_no_numbers(detectors, name):
    """Also where the type looks at scores before boxes are made of them."""
    (found,) = outputs_for(name, 0.0)
    found[...] = np.nan
    with pytest.raises(ValueError, match="no finite numbers"):
        detectors[name].rows([found], SHAPE)


def test_an_answer_of_another_form(detectors):
    """Outputs that a model of open sizes has for one frame alone are looked at, too."""
    with pytest.raises(ValueError, match="which is no yolonas"):
        detectors["yolonas"].rows([np.zeros((1, 7, 1), np.float32)], SHAPE)
