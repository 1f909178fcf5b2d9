"""The command in this process, small files for it, and few mutations in the place of many."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from driver.cli.command import burst

sys.path.insert(0, str(Path(__file__).parent))  # for case_records


@pytest.fixture
def write(tmp_path):
    """Writes cases, or lines as they are, into a file."""

    def write(*cases, name="cases.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(c if isinstance(c, str) else json.dumps(c) for c in cases) + "\n")
        return path

    return write


@pytest.fixture
def vts(shared, monkeypatch):
    """Runs `burst vts …` in this process, with devices that others use, too."""
    shared.enter(monkeypatch)
    return lambda *arguments: CliRunner().invoke(burst, ["vts", *map(str, arguments)])
