"""What the outputs of models that find objects mean, and which boxes are left."""

from types import SimpleNamespace

import numpy as np
import pytest
from frigate_models import BOXES, KINDS, NAMES, SCORES, SIZE, outputs_for

from driver.gateways.detection import DetectionDecoder, FoundBoxes
from driver.gateways.detection.model_types import TYPES
from driver.nn.tensors import TensorInfo


def decoder(model_type="auto", path="net.onnx", tensors=4, inputs=1):
    """Of a model with so many outputs, or with these."""
    if isinstance(tensors, int):
        tensors = [TensorInfo("o", np.dtype(np.float32), None)] * tensors
    return DetectionDecoder(
        SimpleNamespace(inputs=[None] * inputs, outputs=tensors), path, model_type, TYPES, "--type "
    )


def decoded(outputs, model_type="auto", threshold=0.4, size=(SIZE, SIZE), **about):
    """[(class, score, x1, y1, x2, y2)], rounded."""
    decode = decoder(model_type, **{"tensors": len(outputs), **about})
    decode.approve(outputs, *size)
    found = decode(outputs, *size, threshold).best(100, threshold)
    return [
        (kind, *np.round(np.array([score, *edges], np.float64), 4).tolist())
        for kind, score, edges in zip(found.classes.tolist(), found.scores, found.corners, strict=True)
    ]


THE_THREE = [(kind, score, *box) for kind, score, box in zip(KINDS, SCORES, BOXES.tolist(), strict=True)]
END2END = np.zeros((1, 4, 6), np.float32)  # as its documentation has it: the surest first, and rows of zeros behind
END2END[0, :3] = [[*(box * SIZE), score, kind] for kind, score, box in zip(KINDS, SCORES, BOXES, strict=True)]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("said", ["auto", "by its name"])
def test_known_boxes(name, said):
    """Each type's outputs become the boxes that are in them; they are recognised where no type is said."""
    outputs = [END2END] if name not in NAMES else outputs_for(name, 0.0)
    assert decoded(outputs, "auto" if said == "auto" else name, inputs=TYPES[name].inputs) == THE_THREE


@pytest.mark.parametrize("count", [4, 1e30, -3, np.nan, np.inf])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_both_orders_of_an_ssd(order, count):
    """TensorFlow 1's and 2's. No count leads beyond the outputs; one that is no number is an error."""
    outputs = outputs_for("ssd", 0.0)
    outputs[3][:] = count
    outputs = [outputs[n] for n in order]
    if np.isfinite(count):
        assert decoded(outputs) == (THE_THREE if count > 0 else [])
        return
    with pytest.raises(ValueError, match="a number of boxes that is no finite number"):
        decoded(outputs)


def test_one_output_of_an_ssd():
    """OpenVINO's form: rows of image, class, score and corners, which end at an image of -1."""
    out = np.full((1, 1, 5, 7), -1, np.float32)
    for row, its in zip(out[0, 0], THE_THREE, strict=False):
        row[:] = [0, *its]
    out[0, 0, 4] = [0, 1, 0.99, 0, 0, 1, 1]  # behind the end
    assert decoded([out]) == THE_THREE


def test_three_grids_with_anchors():
    """YOLOv4 and v7: each cell says where within itself, and how much of its anchor."""
    outputs = [np.zeros((1, 3 * 8, SIZE // s, SIZE // s), np.float32) for s in (8, 16, 32)]
    outputs[1][0, 8 + 0, 2, 1] = 0.5  # second anchor, 76 x 55, in the cell 1, 2 of 16 pixels: its middle
    outputs[1][0, 8 + 1, 2, 1] = 0.5
    outputs[1][0, 8 + 2 : 8 + 4, 2, 1] = 0.25
    outputs[1][0, 8 + 4 : 8 + 8, 2, 1] = [0.9, 0.1, 0.2, 0.8]
    half = np.array([76, 55]) / 8
    corners = np.clip(np.array([24 - half[0], 40 - half[1], 24 + half[0], 40 + half[1]]) / SIZE, 0, 1)
    ((kind, score, *edges),) = decoded(outputs)
    assert (kind, score) == (2, 0.72)
    assert edges == pytest.approx(corners, abs=1e-4)


@pytest.mark.parametrize("name", ["yolo-generic", "yolo-end2end"])
def test_parts_of_the_frame(name):
    """Ultralytics' .tflite files give these, where its .onnx files give pixels; a size matters to the latter alone."""
    (pixels,) = [END2END] if name == "yolo-end2end" else outputs_for(name, 0.0)
    parts = pixels.copy()
    parts[(..., slice(4)) if name == "yolo-end2end" else (0, slice(4))] /= SIZE
    assert decoded([parts], path="net.tflite", size=(640, 320)) == THE_THREE
    assert decoded([pixels], size=(2 * SIZE, SIZE))[0][2:] == pytest.approx(BOXES[0] * [0.5, 1, 0.5, 1])


def test_quantised():
    """Integers stand for what scale and zero point say."""
    (out,) = outputs_for("yolo-generic", 0.0)
    out[:, 4:] *= 100
    bytes_ = np.round(out / 0.5 + 10).astype(np.uint8)
    tensors = [TensorInfo("o", np.dtype(np.uint8), None, 0.5, 10)]
    found = decoded([bytes_], threshold=40, tensors=tensors)
    assert [(kind, score) for kind, score, *_ in found] == [(2, 90), (0, 80), (1, 60)]
    assert found[0][2:] == pytest.approx(BOXES[0], abs=0.5 / SIZE)


@pytest.mark.parametrize("name", TYPES)
def test_not_of_the_type(name):
    """A model of another type than was said is refused with its outputs, and told the type that it has, if any."""
    outputs = [END2END] if name not in NAMES else outputs_for(name, 0.0)
    other = next(other for other in TYPES if not TYPES[other].fits(outputs, SimpleNamespace(cells=84, height=SIZE)))
    decode = decoder(other, tensors=len(outputs), inputs=TYPES[name].inputs)
    with pytest.raises(ValueError, match=rf"its outputs are .*, and those of {other} .*; say .*--type {name}") as told:
        decode.approve(outputs, SIZE, SIZE)
    assert str(outputs[0].shape) in str(told.value)


def test_of_no_type():
    """All forms are named."""
    with pytest.raises(ValueError, match=r"float32 \(1, 1000\), and those of ssd .* of yolox .*; export it"):
        decoder(tensors=1).approve([np.zeros((1, 1000), np.float32)], SIZE, SIZE)
    with pytest.raises(ValueError, match="--type yolov1: there are ssd, yolonas, yolo-end2end, yolo-generic, yolox"):
        decoder("yolov1")


def test_an_answer_of_another_form():
    """Outputs are looked at for each frame, because a model of open sizes may have another form for one."""
    with pytest.raises(ValueError, match=r"float32 \(1, 7, 1\), which is no yolonas: one of \(N, 7\)"):
        decoder("yolonas", tensors=1)([np.zeros((1, 7, 1), np.float32)], SIZE, SIZE, 0.4)


def boxes(count, score=0.9):
    """As many that do not overlap, in a row."""
    left = np.arange(count, dtype=np.float32) / count
    corners = np.stack([left, np.zeros(count), left + 0.5 / count, np.ones(count)], axis=1).astype(np.float32)
    return FoundBoxes(corners, np.full(count, score, np.float32), np.arange(count))


def test_no_more_than_wanted():
    """The surest of many; none below the threshold; a score of just the threshold is enough."""
    found = boxes(40)._replace(scores=np.linspace(0.3, 0.99, 40, dtype=np.float32))
    assert found.best(20, 0.4).classes.tolist() == list(range(39, 19, -1))
    assert boxes(5, score=0.25).best(20, 0.25).scores.size == 5
    assert boxes(5, score=0.39).best(20, 0.4).scores.size == 0
    assert boxes(5, score=0.0).best(20, 0.0).scores.size == 5


def test_what_overlaps():
    """The surest is left: of all classes, or of its own. Nothing goes if the model has seen to that."""
    near = np.array([[0, 0, 0.5, 0.5], [0.05, 0, 0.55, 0.5], [0.6, 0.6, 1, 1], [0, 0, 0.5, 0.5]], np.float32)
    found = FoundBoxes(near, np.array([0.7, 0.9, 0.8, 0.6], np.float32), np.array([1, 2, 3, 1.0]))
    assert found.best(9, 0.4, by_class=False).classes.tolist() == [2, 3]
    assert found.best(9, 0.4).classes.tolist() == [2, 3, 1]
    assert found._replace(is_final=True).best(9, 0.4).classes.tolist() == [2, 3, 1, 1]


def test_edges_are_inside_of_the_frame():
    """What a model sees beyond them is cut off."""
    found = FoundBoxes(np.array([[-0.5, 0, 2, 1]], np.float32), np.array([0.9], np.float32), np.array([7]))
    assert found.best(9, 0.4).corners.tolist() == [[0, 0, 1, 1]]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["scores", "corners", "classes"])
def test_what_is_no_number_is_an_error(wrong, where):
    """A model that answers NaN has not seen nothing."""
    found = boxes(3)
    found = found._replace(classes=found.classes.astype(np.float32))
    getattr(found, where)[1] = wrong
    if where == "scores" and wrong < 0:  # which is below any threshold
        assert found.best(9, 0.4).classes.tolist() == [0, 2]
        return
    with pytest.raises(ValueError, match="no finite numbers"):
        found.best(9, 0.4)


@pytest.mark.parametrize("name", ["yolo-generic", "yolox"])
def test_scores_that_are_no_numbers(name):
    """Also where the type looks at scores before boxes are made of them."""
    (found,) = outputs_for(name, 0.0)
    found[...] = np.nan
    with pytest.raises(ValueError, match="no finite numbers"):
        decoded([found])
