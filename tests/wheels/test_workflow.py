"""The workflow that builds, tests and publishes the wheels is of GitHub's form, and its linter finds no weakness."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def linted(program, *arguments):
    return subprocess.run(
        [Path(sys.executable).with_name(program), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


FORM = ("check-jsonschema", "--builtin-schema", "vendor.github-workflows")
WEAKNESSES = ("zizmor", "--offline", "--config", ROOT / ".github/zizmor.yml")


@pytest.mark.parametrize("linter", [FORM, WEAKNESSES], ids=lambda linter: linter[0])
def test_the_linters_pass_the_workflows(linter):
    """GitHub's schema of workflows, and what an attacker could make of them."""
    assert WORKFLOWS
    done = linted(*linter, *WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("linter", "ours", "broken"),
    [
        (FORM, "runs-on: ubuntu-24.04", "runs-where: ubuntu-24.04"),
        (WEAKNESSES, "checkout@93cb6efe18208431cddfb8368fd83d5badbf9bfd", "checkout@v5"),
    ],
    ids=["form", "weakness"],
)
def test_the_linters_find_what_is_wrong(tmp_path, linter, ours, broken):
    """A key that GitHub does not know, and an action that a tag names, are each refused."""
    (folder := tmp_path / ".github/workflows").mkdir(parents=True)
    (folder / "wheels.yml").write_text(WORKFLOWS[0].read_text().replace(ours, broken))
    assert linted(*linter, folder / "wheels.yml").returncode
