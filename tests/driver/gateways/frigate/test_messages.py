"""Headers that come, and headers that go."""

import json

import numpy as np
import pytest

from driver.gateways.frigate.exchange import (
    FrameCall,
    ModelQuestion,
    WrongMessage,
    found,
    model_answer,
    read_header,
    refusal,
)


def test_what_is_read():
    """Frames, questions for a model, and models."""
    frame = {"shape": [1, 3, 4, 4], "dtype": "float32", "model_type": "yologeneric"}
    assert read_header(json.dumps(frame).encode()) == FrameCall((1, 3, 4, 4), "float32", "yologeneric")
    assert read_header(b'{"shape": [2], "dtype": "uint8"}') == FrameCall((2,), "uint8", "")
    assert read_header(b'{"model_request": true, "model_name": "a.onnx"}') == ModelQuestion("a.onnx", has_file=False)
    assert read_header(b'{"model_data": true, "model_name": "a.onnx"}') == ModelQuestion("a.onnx", has_file=True)


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[" * 4000, "not valid JSON"),
        (b"[1]", "not an object"),
        (b"{}", "shape None"),
        (b'{"shape": [], "dtype": "uint8"}', "not a list of sizes"),
        (b'{"shape": "1", "dtype": "uint8"}', "not a list of sizes"),
        (b'{"shape": [1, 1, 1, 1, 1, 1, 1, 1, 1], "dtype": "uint8"}', "not a list of sizes"),
        (b'{"shape": [-1], "dtype": "uint8"}', "no frame has"),
        (b'{"shape": [0], "dtype": "uint8"}', "no frame has"),
        (b'{"shape": [1.5], "dtype": "uint8"}', "no frame has"),
        (b'{"shape": [true], "dtype": "uint8"}', "no frame has"),
        (b'{"shape": [99999, 99999], "dtype": "uint8"}', "no frame has"),
        (b'{"shape": [1], "dtype": 5}', "not both strings"),
        (b'{"shape": [1], "dtype": "uint8", "model_type": null}', "not both strings"),
        (b'{"model_request": true}', "not a string"),
        (b'{"model_data": true, "model_name": ["a"]}', "not a string"),
    ],
)
def test_what_is_refused(header, told):
    """It says what is wrong with the header, in few words."""
    with pytest.raises(WrongMessage, match=told) as error:
        read_header(header)
    assert len(str(error.value)) < 200


def test_a_refusal_has_no_rows():
    """So that no detection can be read out of it, and no array of twenty rows can take it."""
    header, body = refusal("why" * 1000)
    said = json.loads(header)
    assert (said["shape"], said["dtype"], body) == ([0, 6], "float32", b"")
    assert len(header) < 1200
    with pytest.raises(ValueError, match="broadcast"):
        np.zeros((20, 6), np.float32)[:] = np.frombuffer(body, said["dtype"]).reshape(said["shape"])


def test_answers():
    """Rows are twenty; a model is there, and is not taken."""
    header, body = found(np.ones((20, 6), np.float32))
    assert json.loads(header) == {"shape": [20, 6], "dtype": "float32"}
    assert len(body) == 480
    (said,) = model_answer(ModelQuestion("a", has_file=True), "no")
    assert json.loads(said) == {"model_saved": False, "model_loaded": False, "model_name": "a", "error": "no"}
