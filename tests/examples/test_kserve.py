"""examples/kserve: its manifests have the fields that KServe's own schema has, and their command serves a model."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/kserve"
MODEL = ROOT / "tests/driver/importers/vendor/mobilenet_int8.tflite"
SCHEMA = json.loads((Path(__file__).parent / "kserve_schema.json").read_text())
TYPES = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "integer or string": (int, str),
}


def manifest(name):
    return yaml.safe_load((FOLDER / name).read_text())


def faults(value, rule, where=""):
    """Where a manifest is not as the schema has it."""
    if isinstance(rule, str):
        return [] if isinstance(value, TYPES[rule]) else [f"{where}: {value!r} is no {rule}"]
    if "one of" in rule:
        return [] if value in rule["one of"] else [f"{where}: {value!r} is none of {rule['one of']}"]
    if "each" in rule:
        return [fault for n, one in enumerate(value) for fault in faults(one, rule["each"], f"{where}[{n}]")]
    if "values" in rule:
        return [fault for name, one in value.items() for fault in faults(one, rule["values"], f"{where}.{name}")]
    found = [f"{where}: {name} is missing" for name in rule.get("required", ()) if name not in value]
    for name, one in value.items():
        its = rule["fields"].get(name)
        found += faults(one, its, f"{where}.{name}") if its else [f"{where}: there is no field {name}"]
    return found


@pytest.mark.parametrize("name", ["runtime.yaml", "inference-service.yaml"])
def test_a_manifest_is_as_kserve_has_it(name):
    """No field that KServe does not know, none that it requires is left out, all of the right type."""
    assert faults(manifest(name), SCHEMA[name]) == []


def test_the_check_finds_faults():
    """A field that does not exist, one that is missing, a wrong type and a choice that there is not."""
    wrong = manifest("runtime.yaml")
    (container,) = wrong["spec"]["containers"]
    container["arguments"] = container.pop("args")
    del container["name"]
    container["ports"][0]["containerPort"] = "8080"
    wrong["spec"]["multiModel"] = "no"
    said = "\n".join(faults(wrong, SCHEMA["runtime.yaml"]))
    for fault in ("no field arguments", "name is missing", "'8080' is no integer", "'no' is no boolean"):
        assert fault in said


def test_the_manifests_fit_each_other_and_the_container():
    """The service names the runtime and a format of it; the container listens where the ports and probes are."""
    runtime, service = manifest("runtime.yaml"), manifest("inference-service.yaml")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert runtime["metadata"]["namespace"] == service["metadata"]["namespace"]
    assert model["modelFormat"]["name"] in {its["name"] for its in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    (container,) = runtime["spec"]["containers"]
    text = (FOLDER / "Containerfile").read_text()
    assert json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1]) == container["args"]
    assert f"USER {container['securityContext']['runAsUser']}" in text
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert {argument.rpartition(":")[2] for argument in container["args"] if "--oip" in argument} == ports
    assert set(re.search(r"^EXPOSE (.*)$", text, re.MULTILINE)[1].split()) == ports
    for probe in ("readinessProbe", "livenessProbe"):
        assert str(container[probe]["httpGet"]["port"]) in ports


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.integration
def test_the_command_of_the_container_serves_a_model(tmp_path, monkeypatch):
    """The runtime's own arguments, but for the ports and the folder: ready, and the model is there."""
    pytest.importorskip("aiohttp", reason="no aiohttp: pip install -e '.[oip]'")
    pytest.importorskip("ai_edge_litert", reason="no litert: pip install -e '.[litert]'")
    (container,) = manifest("runtime.yaml")["spec"]["containers"]
    models = tmp_path / "models"
    models.mkdir()
    shutil.copy(MODEL, models / "mobilenet.tflite")
    port = free_port()
    words = [*container["args"], "--json"]
    words[1], folder = "litert", words[4].partition("=")[2]
    changed = {
        "0.0.0.0:8081": "127.0.0.1:0",
        "0.0.0.0:8080": f"127.0.0.1:{port}",
        folder: str(models),
    }
    for old, new in changed.items():
        words = [word.replace(old, new) for word in words]
    monkeypatch.setenv("BURST_RUNTIME_DIR", str(tmp_path / "run"))
    with subprocess.Popen([sys.executable, "-m", "driver.cli", *words], stdout=subprocess.PIPE, text=True) as server:
        try:
            said = server.stdout.readline()
            assert said, shlex.join(words)
            for probe in ("readinessProbe", "livenessProbe"):
                path = container[probe]["httpGet"]["path"]
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as reply:
                    assert reply.status == 200
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/mobilenet", timeout=20) as reply:
                assert json.load(reply)["inputs"][0]["shape"] == [1, 64, 64, 3]
        finally:
            server.terminate()
            assert server.wait(20) in {0, -15}
