"""Limits of devices, and what devices hear."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def heard():
    """What a device of `burst_test_devices.listening` has heard in this test, of some kinds, in order."""

    def path():
        return Path(os.environ["BURST_RUNTIME_DIR"], "heard")

    def heard(*kinds):
        lines = path().read_text().splitlines() if path().exists() else []
        return [line for line in map(json.loads, lines) if line["what"] in kinds]

    path().unlink(missing_ok=True)
    return heard


@pytest.fixture
def configure(place, monkeypatch, tmp_path):
    """Writes limits.toml for devices that start from now on; gives back where it lies."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config/burst/limits.toml"
    path.parent.mkdir(parents=True)

    def configure(**found):
        path.write_text("".join(f"{name} = {value}\n" for name, value in found.items()))
        return path

    return configure
