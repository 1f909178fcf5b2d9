"""Which models and frames it takes, and the rows that it finds."""

import numpy as np
import pytest
from frigate_models import NAMES, SIZE, frame_of, outputs_for, rows_for, write_detector

from driver.errors import DeviceFailed
from driver.gateways.frigate import FrameDetector, WrongFrame

SHAPE = (1, 3, SIZE, SIZE)


@pytest.fixture(scope="module")
def detectors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: FrameDetector(write_detector(folder / f"{name}.onnx", name), name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pixel", [0.0, 0.5])
def test_known_boxes(detectors, name, pixel):
    """Each type's outputs become the boxes that are in them, the surest first, and rows of zeros behind them."""
    np.testing.assert_allclose(detectors[name].rows(outputs_for(name, pixel), SHAPE), rows_for(pixel), atol=1e-6)


@pytest.mark.parametrize("name", NAMES[:-1])
@pytest.mark.parametrize("other", NAMES[:-1])
def test_a_model_that_is_not_of_the_type(detectors, name, other):
    """Is refused with its outputs, the outputs of the type, and the type that it has."""
    detector = FrameDetector(detectors[other].path, name)
    if name == other:
        detector.approve(outputs_for(name, 0.0))
        return
    with pytest.raises(DeviceFailed, match=rf"is no {name}: its outputs are .*; say --model-type {other}$"):
        detector.approve(outputs_for(other, 0.0))


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


def test_an_answer_of_another_form(detectors):
    """Outputs that a model of open sizes has for one frame alone are looked at, too."""
    with pytest.raises(ValueError, match="which is no yolonas"):
        detectors["yolonas"].rows([np.zeros((1, 7, 1), np.float32)], SHAPE)


def test_no_more_than_twenty(detectors):
    """The surest twenty of many, and none below Frigate's threshold."""
    rows = np.zeros((40, 7), np.float32)
    rows[:, 1] = rows[:, 2] = np.arange(40)
    rows[:, 3] = rows[:, 4] = rows[:, 1] + 1
    rows[:, 5], rows[:, 6] = np.linspace(0.3, 0.99, 40), np.arange(40)
    found = detectors["yolonas"].rows([rows], SHAPE)
    assert found.shape == (20, 6)
    assert list(found[:, 0]) == list(range(39, 19, -1))
    rows[:, 5] = 0.39
    assert not detectors["yolonas"].rows([rows], SHAPE).any()


def test_what_overlaps_is_one_object(detectors):
    """Whatever the classes, as in Frigate."""
    out = outputs_for("yolo-generic", 0.0)
    out[0][0, :4, 1] = out[0][0, :4, 0]  # the second box, of another class, where the first one is
    found = detectors["yolo-generic"].rows(out, SHAPE)
    assert list(found[:3, 0]) == [2, 0, 1]
    assert found[1, 1] == np.float32(0.7)  # what was the second box's double
