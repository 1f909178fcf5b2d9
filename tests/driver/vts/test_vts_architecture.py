"""Who may know whom: the kit needs no command, and nothing needs the kit."""

import ast
from functools import cache
from pathlib import Path

import pytest

import driver
from driver.vts import CATEGORIES

pytestmark = pytest.mark.sources

ROOT = Path(driver.__file__).parent
LIBRARIES = {"click", "rich"}


@cache
def imported(path):
    """Dotted names of everything that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return names


def test_only_the_command_imports_its_libraries():
    """click and rich are the command's: a device, an application and the kit do without.

    The demos need them, too, and so do gateways, which give the command options.
    """
    users = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py") if LIBRARIES & top_level(path)}
    assert users == {"cli", "demos", "gateway.py", "gateways"}


def top_level(path):
    return {name.split(".")[0] for name in imported(path)}


def test_nothing_depends_on_the_kit_but_the_command():
    """And nothing depends on the command."""
    for path in ROOT.rglob("*.py"):
        folder = path.relative_to(ROOT).parts[0]
        for name in imported(path):
            assert not name.startswith("driver.vts") or folder in {"vts", "cli"}, path
            assert not f"{name}.".startswith("driver.cli.") or folder == "cli", path


def test_a_category_is_a_file():
    """Of its name, with a docstring that begins with it."""
    for category in CATEGORIES:
        text = (ROOT / "vts" / f"{category}.py").read_text()
        assert ast.get_docstring(ast.parse(text)).startswith(f"{category}: ")
        assert "def tests(" in text


def test_a_command_is_a_file():
    """Named as the command is."""
    from driver.cli.command import burst

    assert all((ROOT / "cli" / f"{name}.py").is_file() for name in burst.commands)
