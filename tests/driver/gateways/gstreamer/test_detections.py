"""What outputs of detectors mean, without GStreamer."""

import numpy as np
import pytest

from driver.gateways.gstreamer.detections import Detection, DetectionDecoder, label_of, labels_of
from driver.nn.tensors import TensorInfo

F = np.dtype(np.float32)
SSD = [
    TensorInfo("boxes", F, (1, 3, 4)),
    TensorInfo("classes", F, (1, 3)),
    TensorInfo("scores", F, (1, 3)),
    TensorInfo("count", F, (1,)),
]
YOLO = [TensorInfo("output0", F, (1, 6, 5))]
END2END = [TensorInfo("output0", F, (1, 3, 6))]


def rounded(found):
    return [Detection(each.label_id, *(round(value, 4) for value in each[1:])) for each in found]


def ssd_outputs(count=2):
    boxes = np.array([[[0.1, 0.2, 0.5, 0.6], [-0.5, 0, 2, 1], [0, 0, 1, 1]]], np.float32)
    return [
        boxes,
        *(np.array([row], np.float32) for row in ([4, 7, 9], [0.5, 0.9, 1.0])),
        np.array([count], np.float32),
    ]


class TestSsd:
    def test_boxes_best_first(self):
        """Top, left, bottom, right become edges inside of the frame; what lies beyond the count is not looked at."""
        found = rounded(DetectionDecoder("auto", SSD, 0.4, in_pixels=False)(ssd_outputs(), 300, 300))
        assert found == [Detection(7, 0.9, 0, 0, 1, 1), Detection(4, 0.5, 0.2, 0.1, 0.6, 0.5)]

    def test_the_order_of_tensorflow_2(self):
        """Scores, boxes, count, classes give the same."""
        order = [2, 0, 3, 1]
        decode = DetectionDecoder("ssd", [SSD[n] for n in order], 0.4, in_pixels=False)
        found = decode([ssd_outputs()[n] for n in order], 300, 300)
        assert [(each.label_id, round(each.score, 3)) for each in found] == [(7, 0.9), (4, 0.5)]

    @pytest.mark.parametrize("count", [-3, 1e30, np.nan, np.inf])
    def test_a_count_that_lies(self, count):
        """No count leads beyond the outputs."""
        found = DetectionDecoder("ssd", SSD, 0.0, in_pixels=False)(ssd_outputs(count), 300, 300)
        assert len(found) <= 3

    def test_numbers_that_are_none(self):
        """A box or a score that is not finite is no detection."""
        outputs = ssd_outputs(3)
        outputs[0][0, 0, 0] = np.nan
        outputs[2][0, 1] = np.nan
        found = DetectionDecoder("ssd", SSD, 0.1, in_pixels=False)(outputs, 300, 300)
        assert [each.label_id for each in found] == [9]


class TestYolo:
    def outputs(self):
        """Five candidates of two classes: two on one object and a third of the other class, one too weak, one apart."""
        rows = [[50, 52, 50, 50, 10], [50, 50, 50, 50, 10], [20, 20, 20, 20, 4], [20, 20, 20, 20, 4]]
        scores = [[0.9, 0.8, 0.1, 0.2, 0.6], [0.0, 0.0, 0.7, 0.1, 0.1]]
        return [np.array([rows + scores], np.float32)]

    def test_what_overlaps_goes(self):
        """Of one class the best stays; another class stays beside it."""
        found = rounded(DetectionDecoder("auto", YOLO, 0.5, in_pixels=True)(self.outputs(), 100, 100))
        assert found == [
            Detection(0, 0.9, 0.4, 0.4, 0.6, 0.6),
            Detection(1, 0.7, 0.4, 0.4, 0.6, 0.6),
            Detection(0, 0.6, 0.08, 0.08, 0.12, 0.12),
        ]

    def test_fractions(self):
        """Where the model gives fractions of the frame, its size does not matter."""
        outputs = self.outputs()
        outputs[0][:, :4] /= 100
        found = DetectionDecoder("yolo", YOLO, 0.5, in_pixels=False)(outputs, 640, 320)
        assert rounded(found)[0] == Detection(0, 0.9, 0.4, 0.4, 0.6, 0.6)

    def test_quantised(self):
        """Integers stand for what scale and zero point say."""
        info = TensorInfo("output0", np.dtype(np.uint8), (1, 6, 5), 0.5, 10)
        values = (self.outputs()[0] * np.float32([1, 1, 1, 1, 100, 100]).reshape(1, 6, 1) / 0.5 + 10).astype(np.uint8)
        found = DetectionDecoder("yolo", [info], 0.5, in_pixels=True)([values], 100, 100)
        assert found[0][2:] == pytest.approx((0.4, 0.4, 0.6, 0.6))
        assert found[0].label_id == 0


class TestEnd2End:
    def test_rows(self):
        """Edges, score and class of each."""
        rows = np.array([[[10, 20, 30, 40, 0.9, 3], [0, 0, 5, 5, 0.1, 1], [0, 0, 100, 100, 0.95, 2]]], np.float32)
        found = rounded(DetectionDecoder("auto", END2END, 0.5, in_pixels=True)([rows], 100, 200))
        assert found == [Detection(2, 0.95, 0, 0, 1, 0.5), Detection(3, 0.9, 0.1, 0.1, 0.3, 0.2)]


class TestWrong:
    @pytest.mark.parametrize(("kind", "outputs"), [("ssd", YOLO), ("yolo", SSD), ("auto", SSD[:2]), ("yolo", END2END)])
    def test_not_of_the_type(self, kind, outputs):
        """A model of another type than was said is refused, with its outputs, before it runs."""
        with pytest.raises(ValueError, match=r"model-type.*: float32 \["):
            DetectionDecoder(kind, outputs, 0.5, in_pixels=True)

    def test_arguments(self):
        """Types and thresholds that do not exist."""
        with pytest.raises(ValueError, match="one of auto, ssd, yolo, yolo-end2end"):
            DetectionDecoder("yolov1", YOLO, 0.5, in_pixels=True)
        with pytest.raises(ValueError, match=r"threshold=1.5: a score from 0 to 1"):
            DetectionDecoder("yolo", YOLO, 1.5, in_pixels=True)

    def test_outputs_that_are_not_what_the_file_said(self):
        """Shapes are looked at again when they come."""
        open_shape = [TensorInfo("output0", F, None)]
        with pytest.raises(ValueError, match=r"shape \(2, 3\) is not that of a YOLO"):
            DetectionDecoder("yolo", [TensorInfo("o", F, (None, None, None))], 0.5, in_pixels=True)(
                [np.zeros((2, 3), np.float32)], 9, 9
            )
        with pytest.raises(ValueError, match="does not recognise"):
            DetectionDecoder("auto", open_shape * 2, 0.5, in_pixels=True)


def test_labels():
    """By line, or by number; a class without a name is called by its number."""
    assert labels_of("dog\ncat\n") == ["dog", "cat"]
    assert labels_of("2 traffic light\n0: dog\n") == ["dog", "", "traffic light"]
    assert [label_of(["dog", ""], n) for n in (0, 1, 2, -1)] == ["dog", "class 1", "class 2", "class -1"]
    assert labels_of("") == []
