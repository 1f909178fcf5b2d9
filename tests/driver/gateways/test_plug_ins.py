"""Gateways of other distributions in `burst serve` and `burst doctor`: those that work, and those that do not."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import driver.gateway
from burst_engine.names import install_command
from driver import doctor

PAGE = Path(__file__).parents[3] / "docs/howto/gateway.md"
COMMAND = [sys.executable, "-m", "driver.cli", "serve"]

ODD = """
from contextlib import asynccontextmanager
import click
from driver.gateway import Gateway

class FailingGateway(Gateway):
    def options(self):
        return [click.Option(["--failing"], is_flag=True, help="Fail at the start.")]

    @asynccontextmanager
    async def serve(self, call):
        raise RuntimeError("the dog ate it")
        yield

class LackingGateway(FailingGateway):
    libraries = ("no_such_library",)

    def options(self):
        return [click.Option(["--lacking"], is_flag=True, help="Lack a library.")]

class GreedyGateway(FailingGateway):
    def options(self):
        return [click.Option(["--metrics"], help="Is there already.")]

    def checks(self):
        def fail():
            raise OSError("no look")
        return {"greed": fail}

wrong = 3
"""
ENTRIES = """[burst.gateways]
doubler = burst_doubler:DoublerGateway
failing = burst_odd:FailingGateway
greedy = burst_odd:GreedyGateway
lacking = burst_odd:LackingGateway
missing = burst_odd_and_missing:Gateway
wrong = burst_odd:wrong
"""


@pytest.fixture(scope="module")
def distribution(tmp_path_factory):
    """A folder with the page's gateway and five that are broken, as pip installs them."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "burst_doubler.py").write_text(PAGE.read_text().split("```python\n")[1].split("```")[0])
    (folder / "burst_odd.py").write_text(ODD)
    about = folder / "burst_odd-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: burst-odd\nVersion: 1.5\nProvides-Extra: lacking\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    return folder


@pytest.fixture
def started(distribution):
    """Starts `burst serve` beside that distribution."""

    def start(*words):
        environment = {**os.environ, "PYTHONPATH": str(distribution), "COLUMNS": "200"}
        return subprocess.Popen(
            [*COMMAND, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return start


def test_it_is_served_from_start_to_stop(started):
    """The program of the page answers, and ends with 0 on SIGTERM."""
    with started("reference", "--doubler", "0", "--json") as process:
        told = json.loads(process.stdout.readline())
        assert told["device"] == "reference"
        with socket.create_connection(("127.0.0.1", told["port"]), 20) as client:
            client.sendall(b"1 2 3 4.5\n")
            assert client.makefile().readline() == "2.0 4.0 6.0 9.0\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@pytest.mark.integration
def test_the_help_has_all_of_them(started):
    """Options and example of what is installed, ours and others', and why some cannot be used."""
    with started("--help") as process:
        text = " ".join(process.communicate()[0].split())
    assert "Gateway doubler (burst-odd 1.5): --doubler PORT Double lines of four numbers" in text
    assert "burst serve reference --doubler 9000" in text
    assert "Gateway lacking (burst-odd 1.5; no_such_library not installed: pip install 'burst-odd[lacking]')" in text
    assert "--oip ADDRESS" in text
    broken = text.partition("Gateways that cannot be used: ")[2]
    assert "greedy (burst-odd 1.5) ValueError: burst serve has an option --metrics already" in broken
    assert "missing (burst-odd 1.5) ModuleNotFoundError: No module named 'burst_odd_and_missing'" in broken
    assert "wrong (burst-odd 1.5) TypeError: burst_odd:wrong is not a subclass of driver.gateway.Gateway" in broken


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--doubler", "70000"], 2, "a port is at most 65535"),
        (["--failing"], 1, "the gateway 'failing' of burst-odd 1.5 failed: RuntimeError: the dog ate it"),
        (["--lacking"], 2, "--lacking: no_such_library not installed: pip install 'burst-odd[lacking]'"),
        (["--missing", "3"], 2, "the gateway 'missing' of burst-odd 1.5 cannot be used: ModuleNotFoundError"),
        (["--doubler", "0", "--failing"], 2, "--doubler and --failing are of different gateways"),
        (["--doubler", "0", "--group", "users"], 2, "give --group to another burst serve"),
    ],
)
def test_what_cannot_be_served(started, words, code, told):
    """The error names the gateway and what to do."""
    with started("reference", *words) as process:
        errors = process.communicate()[1]
    assert process.returncode == code
    assert told in " ".join(errors.split())


def test_the_doctor_names_them(distribution, monkeypatch):
    """A gateway that cannot be loaded is a warning, a check that fails a note, and the others' checks go on."""
    monkeypatch.syspath_prepend(str(distribution))
    monkeypatch.setattr("driver.doctor.examination.CHECKS", {})
    found = {finding.subject: finding for finding in doctor.examine()}
    assert found["gateway 'missing' of burst-odd 1.5"].state == "warning"
    assert "is not a subclass" in found["gateway 'wrong' of burst-odd 1.5"].found
    assert found["greed"].found == "unknown: OSError: no look"
    assert found["cameras"]


def test_ours_are_known_where_nothing_is_installed_for_them():
    """A newcomer who asked for none of them gets no warning by the doctor: each says what it lacks when it is asked."""
    lacking = ["aiohttp", "cv2", "gi", "grpc", "tokenizers", "wyoming"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({lacking}))\n"
        "import driver.gateway\n"
        "print([each.fault for each in driver.gateway.installed_gateways() if each.fault])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ours_are_named_after_their_extras():
    """So that each error for a missing library names the extra that installs it."""
    ours = [each for each in driver.gateway.installed_gateways() if each.distribution.startswith("burst-engine ")]
    assert {each.name: each.fault for each in ours} == dict.fromkeys(
        ("camera", "embeddings", "frigate", "gstreamer", "oip", "wyoming"), ""
    )
    assert [each.remedy for each in ours] == [install_command(each.name) for each in ours]
