"""openWakeWord, a program that nobody changed for this, with its interpreters in a device."""

import numpy as np
import pytest
from kills import kill
from openwakeword_itself import their_model
from openwakeword_models import fetch

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from ai_edge_litert import interpreter as package

import driver.dropin.litert as dropin
from driver.dropin.device_model import connections

pytestmark = pytest.mark.integration

WORDS = ["hey_jarvis_v0.1", "alexa_v0.1", "weather_v0.1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openwakeword")
    fetch(folder)
    return folder


def activations(monkeypatch, models, module, between=lambda _: None):
    """The activations of openWakeWord's own code for two seconds of sound, a row for each 80 ms."""
    its = their_model(monkeypatch, module, models, [models / f"{word}.tflite" for word in WORDS])
    sound = (np.random.default_rng(1).standard_normal(32000) * 3000).astype(np.int16)
    found = []
    for begin in range(0, len(sound), 1280):
        step = its.predict(sound[begin : begin + 1280])
        found.append([step[word] for word in WORDS])
        between(len(found))
    return np.array(found)


@pytest.mark.filterwarnings("ignore")
def test_activations_of_openwakeword(counted, monkeypatch, models):
    """The same bits, and with the device killed in between; every run was in a device."""

    def killing(step):
        if step in {7, 8, 15}:
            kill(connections.to("litert"), "both")

    expected = activations(monkeypatch, models, package)
    assert np.ptp(expected) > 0
    assert activations(monkeypatch, models, dropin).tobytes() == expected.tobytes()
    assert activations(monkeypatch, models, dropin, killing).tobytes() == expected.tobytes()
    rows = counted()["models"]
    assert len(rows) == 5
    assert all(row["device_runs"] > 0 and "process_runs" not in row for row in rows)
