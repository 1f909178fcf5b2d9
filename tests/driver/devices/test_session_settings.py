"""Settings of a session that travel in an .onnx file: what is said is set, and what a stranger says is refused."""

import numpy as np
import onnxruntime
import pytest

from driver.devices.onnxruntime.onnx_file import taken_apart
from driver.devices.onnxruntime.session_settings import ENTRIES, SessionSettings, settings_of
from driver.nn import InvalidModel

GIVEN = SessionSettings(
    "ORT_ENABLE_BASIC", 1, entries={"session.disable_quant_qdq": "1"}, sizes={"n": 2}, denotations={"BATCH": 3}
)
FILE = b"\x08\x08:\x00"  # an IR version, and an empty graph


def told(settings):
    return taken_apart(np.frombuffer(FILE + settings.encoded(), np.uint8)).settings


def test_what_is_said_arrives():
    """All of it; a file without an entry has none."""
    assert told(GIVEN) == GIVEN
    assert taken_apart(np.frombuffer(FILE, np.uint8)).settings is None


def test_a_session_is_made_so():
    """ONNX Runtime has what was said; threads within the machine."""
    options = onnxruntime.SessionOptions()
    GIVEN._replace(threads=200).add_to(options, onnxruntime)
    assert options.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert 1 <= options.intra_op_num_threads < 200
    assert options.get_session_config_entry("session.disable_quant_qdq") == "1"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[]",
        '{"level": "HIGH"}',
        '{"threads": -1}',
        '{"threads": 1e3}',
        '{"entries": {"session.model_external_initializers_file_folder_path": "/"}}',
        '{"entries": {"session.disable_quant_qdq": 1}}',
        '{"sizes": {"n": 0}}',
        '{"sizes": [1]}',
        '{"other": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_setting_is_refused(text):
    """A file comes from anybody."""
    with pytest.raises(InvalidModel, match="no settings of a session"):
        settings_of(text)


def test_no_entry_names_a_file_or_a_library():
    """Only what decides about bits."""
    assert not [key for key in ENTRIES if "path" in key or "file" in key or "lib" in key]
