"""The recipe of the container and compose.yaml: their commands exist, and what they copy builds."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import click
import pytest
import yaml

from driver.cli.command import burst as command

ROOT = Path(__file__).parents[1]
RECIPE = re.sub(r"\\\n", " ", (ROOT / "Containerfile").read_text())
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
KNOWN = {"FROM", "RUN", "COPY", "ARG", "USER", "VOLUME", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def words_of(instruction):
    """The JSON words of the recipe's last line of that kind."""
    return json.loads(re.findall(rf"^{instruction} .*?(\[.*\])$", RECIPE, re.MULTILINE)[-1])


def test_each_line_is_an_instruction():
    """None is misspelt, and no shell stands between the container's init and the command."""
    found = [line.split()[0] for line in RECIPE.splitlines() if line and not line.startswith("#")]
    assert set(found) == KNOWN
    assert words_of("ENTRYPOINT") == ["burst"]


@pytest.mark.parametrize(
    "words",
    [words_of("CMD"), words_of("HEALTHCHECK")[1:], COMPOSE["services"]["client"]["command"]],
    ids=["CMD", "HEALTHCHECK", "client"],
)
def test_its_commands_are_of_the_command(words):
    """With options that there are, and values that these take."""
    name, *rest = words
    whole = click.Context(command, **command.context_settings)
    with command.get_command(whole, name).make_context(name, rest, parent=whole) as context:
        assert context.params


def test_compose_and_the_recipe_agree():
    """The socket, its folder, the group, and the extras that the device needs."""
    device, client = COMPOSE["services"]["device"], COMPOSE["services"]["client"]
    assert device["build"]["dockerfile"] == "Containerfile"
    socket = f"/run/burst/{words_of('CMD')[1]}.sock"
    assert words_of("HEALTHCHECK")[-1] == client["command"][-1] == socket
    assert client["group_add"] == re.findall(r"groupadd --gid (\d+)", RECIPE)
    volumes = {volume.split(":")[0] for service in (device, client) for volume in service["volumes"]}
    assert volumes == set(COMPOSE["volumes"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (chosen,) = set(re.findall(r"^ARG EXTRAS=(\S+)$", RECIPE, re.MULTILINE))
    assert {words_of("CMD")[1]} <= set(chosen.split(",")) <= set(extras)


@pytest.mark.integration
def test_the_recipe_builds_and_its_device_is_healthy(tmp_path):
    """All but the container itself: what .dockerignore lets in is built and installed as the recipe says, the device is
    served, and HEALTHCHECK finds it."""
    context, wheels = tmp_path / "src", tmp_path / "wheels"
    context.mkdir()
    kept = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    for each in kept:
        copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copy
        copy(ROOT / each, context / each)
    build, install = re.findall(r"(pip .*)", RECIPE)
    venv.create(tmp_path / "venv")
    pip = f"{shlex.quote(sys.executable)} -m pip --python {tmp_path}/venv/bin/python"
    for line in (build.replace("pip", f"{sys.executable} -m pip", 1), install.replace("pip", pip, 1)):
        here = line.replace("$EXTRAS", "onnxruntime").replace("/wheels", str(wheels)).replace("/src", str(context))
        done = subprocess.run(["sh", "-c", here], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    program, group = tmp_path / "venv/bin/burst", "--group"
    words = words_of("CMD")[: words_of("CMD").index(group)]  # such a group need not be here
    environment = os.environ | {"BURST_RUNTIME_DIR": str(tmp_path / "run")}
    serve = [program, *words, "--dir", tmp_path / "served"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stdout.readline()
            check = [program, *words_of("HEALTHCHECK")[1:-1], tmp_path / "served/onnxruntime.sock"]
            assert subprocess.run(check, timeout=60, check=False, env=environment).returncode == 0
        finally:
            server.terminate()
