"""The folder packaging: board, alerts, add-on and recipes name what there is, and say what they promise."""

import ast
import http.server
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import threading
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from needed_tools import give_up

from driver.cli.command import burst as command

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RULES = yaml.safe_load((RECIPES / "prometheus/burst.rules.yaml").read_text())["groups"][0]["rules"]
BOARD = json.loads((RECIPES / "grafana/burst.json").read_text())
ADDON = RECIPES / "home-assistant/wake_words"


# ---- Prometheus and Grafana -----------------------------------------------------------------------------------------

SAMPLES = {"Counter": ["_total"], "Gauge": [""], "Info": ["_info"], "Histogram": ["_bucket", "_sum", "_count"]}


def metrics():
    """Sample name -> the texts of the file that makes it, of which labels are some."""
    for path in (ROOT / "driver").rglob("*.py"):
        if "MetricFamily" not in (source := path.read_text()):
            continue
        texts = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
        # A call, or a row of a table of them.
        found = re.findall(r'(\w+)MetricFamily\(\s*"(burst_\w+)"', source)
        found += [(kind, name) for name, kind in re.findall(r'\("(burst_\w+)", "[^"]*", (\w+)MetricFamily\)', source)]
        for kind, name in found:
            yield from ((name + ending, texts) for ending in SAMPLES[kind])


METRICS = dict(metrics())
QUERIES = [rule["expr"] for rule in RULES]
QUERIES += [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_names_metrics_and_labels_that_there_are(query):
    """Of the product's own sources; `instance` and `le` are Prometheus' labels."""
    names = re.findall(r"\bburst_\w+", query)
    assert names
    assert [name for name in names if name not in METRICS] == []
    known = {"instance", "le", "uid"}.union(*(METRICS[name] for name in names))
    labels = re.findall(r'[{,]\s*(\w+)(?:=~|!=|=)"', query)
    labels += [label for group in re.findall(r"(?:by|on) \(([^)]*)\)", query) for label in group.split(", ")]
    assert [label for label in labels if label not in known] == []
    values = [value for value in re.findall(r'\w+!?="([^"$]*)"', query) if value != "total"]
    assert [value for value in values if value not in known] == []


def test_a_metric_that_is_gone_is_found():
    """So that silence above means something."""
    known = {"burst_healthy", "burst_executions_total", "burst_request_seconds_bucket", "burst_device_info"}
    assert known <= set(METRICS)
    with pytest.raises(AssertionError):
        test_a_query_names_metrics_and_labels_that_there_are("rate(burst_frobs_total[5m])")
    with pytest.raises(AssertionError):
        test_a_query_names_metrics_and_labels_that_there_are('burst_waiting{colour="red"}')


def test_the_page_has_each_alert():
    """With a word about when it fires; each says what is wrong, and how bad that is."""
    page = (ROOT / "docs/howto/grafana.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [rule["alert"] for rule in RULES]
    assert all(rule["labels"]["severity"] in {"critical", "warning", "info"} for rule in RULES)
    assert all("{{ $labels.instance }}" in r["annotations"]["summary"] or "absent" in r["expr"] for r in RULES)


def test_panels_do_not_overlap():
    """Each has a place of its own on the board, and a data source that the reader chooses."""
    taken = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "${source}"}
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_promtool_takes_the_rules():
    """It parses each, and the story of its tests fires those that it should."""
    if not (promtool := shutil.which("promtool")):
        pytest.skip("no promtool (Debian: apt install prometheus)")
    folder = RECIPES / "prometheus"
    for words in (("check", "rules", "burst.rules.yaml"), ("test", "rules", "burst.tests.yaml")):
        done = subprocess.run([promtool, *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# ---- Home Assistant -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def addon():
    """The add-on's program, as a module."""
    spec = importlib.util.spec_from_file_location("addon", ADDON / "addon.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFIG = yaml.safe_load((ADDON / "config.yaml").read_text())


def test_the_configuration_keeps_the_schema():
    """Of what Home Assistant's Supervisor takes; a misspelt key is found."""
    jsonschema = pytest.importorskip("jsonschema", reason="pip install '.[check]'")
    schema = json.loads((RECIPES / "home-assistant/config.schema.json").read_text())
    jsonschema.validate(CONFIG, schema)
    for wrong in ({"prots": {}}, {"arch": ["armhf"]}, {"schema": {"models": "string"}}, {"map": [{"type": "shared"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(CONFIG | wrong, schema)


def test_options_schema_words_and_version_agree():
    """Each option has a default, a type and a name; the version is ours."""
    words = yaml.safe_load((ADDON / "translations/en.yaml").read_text())
    assert CONFIG["options"].keys() == CONFIG["schema"].keys() == words["configuration"].keys()
    assert CONFIG["ports"].keys() == words["network"].keys()
    assert CONFIG["version"] == PROJECT["version"]
    for option in CONFIG["options"]:
        assert f"| `{option}` |" in (ADDON / "DOCS.md").read_text()
    (extras,) = re.findall(r"\)\[([\w,]+)\]\"", (ADDON / "Dockerfile").read_text())
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("device", re.search(r"list\((.*)\)", CONFIG["schema"]["device"])[1].split("|"))
def test_it_starts_a_command_that_there_is(addon, device):
    """With options that `burst serve` takes."""
    _, name, *rest = addon.command(CONFIG["options"] | {"device": device, "models": str(ROOT)})
    whole = click.Context(command, **command.context_settings)
    with command.get_command(whole, name).make_context(name, rest, parent=whole) as context:
        assert context.params["device"] == device


def test_it_announces_itself(addon):
    """By the Supervisor's own call, with its token, and an address that Home Assistant reaches."""
    asked = []

    class Supervisor(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Supervisor) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        addon.announce(f"http://127.0.0.1:{server.server_port}", "secret", "burst-wake-words")
        thread.join()
    body = {"service": "wyoming", "config": {"uri": "tcp://burst-wake-words:10400"}}
    assert asked == [("/discovery", "Bearer secret", body)]
    assert [body["service"]] == CONFIG["discovery"]
    assert f"{addon.PORT}/tcp" in CONFIG["ports"]


@pytest.mark.parametrize(("name", "size"), [("icon.png", (128, 128)), ("logo.png", (250, 100))])
def test_its_pictures_have_the_sizes_that_the_store_shows(name, size):
    """By the header of the PNG."""
    head = (ADDON / name).read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:]) == size


# ---- conda ----------------------------------------------------------------------------------------------------------

OTHER_NAMES = {"msgpack": "msgpack-python", "blake3": "python-blake3"}  # what conda-forge calls packages of PyPI


def test_the_recipe_of_conda_requires_what_the_project_requires():
    """The same packages from the same versions on; posix_ipc is no more than a choice."""
    recipe = yaml.safe_load((RECIPES / "conda/recipe.yaml").read_text())
    needed = {f"python {PROJECT['requires-python']}"}
    for line in PROJECT["dependencies"]:
        name, least = re.match(r"(\w+)(>=[\d.]+)", line).groups()
        if name != "posix_ipc":
            needed.add(f"{OTHER_NAMES.get(name, name)} {least}")
    assert set(recipe["requirements"]["run"]) == needed
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {line.replace(" ", "") for line in recipe["requirements"]["host"]} == {"python", "pip", *build}
    assert recipe["context"]["version"] == PROJECT["version"]
    scripts = {f"{name} = {place}" for name, place in PROJECT["scripts"].items()}
    assert set(recipe["build"]["python"]["entry_points"]) == scripts


# ---- Debian ---------------------------------------------------------------------------------------------------------


def test_the_debian_package_has_the_version():
    """Its newest entry is of the project's version."""
    assert (RECIPES / "debian/changelog").read_text().startswith(f"burst-engine ({PROJECT['version']}) ")


@pytest.mark.integration
def test_the_debian_package_is_built_and_its_command_runs(tmp_path):
    """dpkg-buildpackage makes it of the sources; unpacked, its unit names its command, and that runs a model."""
    if not (shutil.which("dpkg-buildpackage") and shutil.which("dh")):
        give_up("apt install dpkg-dev debhelper")
    sources = tmp_path / "burst"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = ("burst", "burst_engine", "fmq", "driver", "csrc", "docs", "packaging", "pyproject.toml", "README.md")
    for name in filter(None, tracked.split("\0")):
        if name.startswith((*wanted, "LICENSE", "CHANGELOG.md")) and (ROOT / name).is_file():
            (sources / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, sources / name)
    shutil.copytree(sources / "packaging/debian", sources / "debian")
    build = ["dpkg-buildpackage", "--build=binary", "--unsigned-changes", "--no-check-builddeps"]
    quick = {"DPKG_DEB_COMPRESSOR_TYPE": "gzip", "DPKG_DEB_COMPRESSOR_LEVEL": "1"}
    built(build, sources, EXTRAS="metrics", **quick)
    (package,) = tmp_path.glob("burst-engine_*.deb")
    root = tmp_path / "root"
    built(["dpkg-deb", "--extract", package, root], tmp_path)
    unit = (root / "lib/systemd/system/burst@.service").read_text()
    assert "ExecStart=/usr/bin/burst serve %i --group inference" in unit
    assert "User=burst" in unit
    assert (root / "usr/share/man/man1/burst-serve.1.gz").is_file()
    assert "u burst" in (root / "usr/lib/sysusers.d/burst-engine.conf").read_text()
    left = subprocess.run(["grep", "-rlI", str(sources), root], capture_output=True, text=True, check=False).stdout
    assert left == "", "files name the place where the package was built"
    (root / "usr/bin/python3").symlink_to("/usr/bin/python3")  # which the package depends on
    place = root / "usr/lib/burst"
    python = [place / "bin/python3", "-m", "burst_engine"]
    assert '"reference"' in built([*python, "devices", "--json"], tmp_path, BURST_RUNTIME_DIR=tmp_path / "run")
    assert (root / "usr/bin/burst").readlink() == Path("../lib/burst/bin/burst")
    fields = built(["dpkg-deb", "--field", package], tmp_path)
    assert re.search(r"Depends: .*python3 \(>= 3\.\d+\), python3 \(<< 3\.\d+\)", fields)


def built(words, folder, **more):
    """What the command prints; its complaints are the test's failure."""
    environment = os.environ | {name: str(value) for name, value in more.items()}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
