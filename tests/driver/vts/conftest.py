"""The command in this process, small files for it, and few mutations in the place of many."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import driver.vts.model
import driver.vts.request
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
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(shared.path))
    return lambda *arguments: CliRunner().invoke(burst, ["vts", *map(str, arguments)])


@pytest.fixture
def few_mutations(monkeypatch):
    """Two broken models and two broken requests of each sample."""

    def models(model):
        graph = model.main
        twice = replace(model, main=replace(graph, inputs=(*graph.inputs, graph.inputs[0])))
        beyond = replace(model, main=replace(graph, outputs=(len(graph.operands),)))
        yield SimpleNamespace(name="input_listed_twice", make=lambda: twice)
        yield SimpleNamespace(name="output_that_does_not_exist", make=lambda: beyond)

    def requests(request):
        yield "without_input", request._replace(inputs=request.inputs[1:])
        yield "without_output", request._replace(outputs=request.outputs[1:])

    monkeypatch.setattr(driver.vts.model, "model_mutations", models)
    monkeypatch.setattr(driver.vts.request, "request_mutations", requests)
