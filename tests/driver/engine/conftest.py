"""Limits of devices."""

import pytest


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
