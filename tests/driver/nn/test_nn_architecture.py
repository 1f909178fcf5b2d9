"""What holds for the package as a whole."""

import ast
import re
import sys
from pathlib import Path

import pytest

import driver.nn
from driver.nn import OPERATIONS
from driver.nn.operation import steers

PACKAGE = Path(driver.nn.__file__).parent
HERE = Path(__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def imported(tree):
    """Top-level names of the absolute imports in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "driver.late_names":
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_leaf_imports_numpy_and_the_standard_library_only(path):
    """driver.nn imports nothing else of ours but what imports names late, and neither threads nor files."""
    tree = ast.parse(path.read_text())
    others = set(imported(tree)) - {"numpy"}
    assert others <= set(sys.stdlib_module_names) - {"threading", "os", "mmap", "socket", "multiprocessing"}
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert all(level <= len(path.relative_to(PACKAGE).parts) for level in levels)


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    """No file above 400 lines, no function above 60."""
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_exported_names_are_sorted_and_exist():
    """__all__ is what the package offers, constants first."""
    assert sorted(driver.nn.__all__, key=lambda name: (not name.isupper(), name)) == driver.nn.__all__
    assert all(hasattr(driver.nn, name) for name in driver.nn.__all__)


def test_the_table_is_complete():
    """Every operation of HAL 1.0-1.3, codes 0 to 101, stands once and under its own name."""
    assert all(name == kind.name for name, kind in OPERATIONS.items())
    assert sorted(kind.code for kind in OPERATIONS.values()) == list(range(102))


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_a_test(name):
    """A listed operation without a test that carries its name fails here."""
    tests = re.findall(r"def (test_\w+)", "".join(p.read_text() for p in (HERE / "ops").glob("test_*.py")))
    word = re.compile(rf"_{name.lower()}(_|$)")
    others = [other.lower() for other in OPERATIONS if name.lower() in other.lower() and other != name]

    def is_about(test):
        for other in others:  # DEPTHWISE_CONV_2D is no test of CONV_2D
            test = test.replace(other, "")
        return word.search(test)

    assert any(is_about(test) for test in tests)


@pytest.mark.parametrize("kind", OPERATIONS.values(), ids=lambda k: k.name)
def test_signatures_are_well_formed(kind):
    """Every slot of every form names a type, and weights are transformed only where they do not steer."""
    for signature in kind.signatures:
        assert signature.versions()
        slots, _ = signature.slots(len(signature.inputs.split()) if "*" not in signature.inputs else _count(signature))
        assert all(not steers(slots[i]) for i in kind.pack)


def _count(signature):
    return sum(int(n or 1) for n in re.findall(r"(?:(\d+)\*)?[\w.?]+", signature.inputs))
