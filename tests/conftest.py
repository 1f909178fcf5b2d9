"""Tests talk to devices of their own, never to the user's."""

import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path

import hung_tests
import pytest
import together

TESTS = Path(__file__).parent

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # else gRPC starts threads in every process that a later test forks


def pytest_addoption(parser):
    parser.addoption("--apart", action="store_true", help="each case of a parametrised test as a test of its own")


def pytest_sessionstart(session):
    """Ends the run where the installed package does not have the entry points of pyproject.toml: tests need them. From
    now on, a test that hangs is ended.
    """
    text = TESTS.parent.joinpath("pyproject.toml").read_text()
    wanted = tomllib.loads(text)["project"]["entry-points"]
    found = metadata.entry_points()
    if any(set(found.select(group=group).names) < set(names) for group, names in wanted.items()):
        pytest.exit(
            "the installed burst-engine lacks entry points of pyproject.toml: pip install --no-deps --editable ."
        )
    hung_tests.watch(session.config)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """One test instead of many, in the places that `together` knows."""
    config = collector.config
    if not callable(obj) or config.getoption("apart") or not together.is_wanted(collector.path, config.rootpath):
        return None
    one = together.together(obj) if name.startswith("test_") else None
    if one is None:
        return None
    setattr(collector.obj, name, one)
    return collector.ihook.pytest_pycollect_makeitem(collector=collector, name=name, obj=one)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests live as long as the run does: whoever collects garbage later need not look at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items):
    """First the files beside this one and hostile ones: they are long, and a late one keeps other workers waiting."""
    items.sort(key=lambda item: item.path.parent not in {TESTS, TESTS / "hostile"})


_tally, _rows = Counter(), defaultdict(list)


@pytest.fixture(scope="session")
def tally():
    """Counts what a test has done, for the table at the end: `tally("kills", 50)`."""

    def count(what, times=1):
        _tally[what] += times

    return count


@pytest.fixture(scope="session")
def table_row():
    """Keeps a line for a table at the end: `table_row("head of the table", "its next line")`."""

    def keep(head, line):
        _rows[head].append(line)

    return keep


def pytest_terminal_summary(terminalreporter):
    """What was done, where it was counted, and for whoever started the tests to add up; and tables of outcomes."""
    if _tally:
        terminalreporter.section("what was done")
        for what, times in sorted(_tally.items()):
            terminalreporter.line(f"{times:>12,} {what}")
    if file := os.environ.get("BURST_TALLY"):
        Path(file).write_text(json.dumps(_tally))
    for head, rows in _rows.items():
        terminalreporter.section("outcomes")
        for line in (head, *rows):
            terminalreporter.line(line)


def pytest_sessionfinish(session):
    """A worker hands its figures over."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["figures"] = dict(_tally), dict(_rows)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """The figures of a worker; or how one ended that should not have: by which signal, or with which status."""
    if error:
        print(f"\n{node.gateway.id} ended with {node.gateway._io.wait()}", file=sys.stderr)
    done, tables = getattr(node, "workeroutput", {}).get("figures", ({}, {}))
    _tally.update(done)
    for head, rows in tables.items():
        _rows[head] += rows


@pytest.fixture(autouse=True)
def ctrl_c():
    """A shell that runs us in the background ignores SIGINT for us and for our children; tests of Ctrl-C need it. Each
    test has it anew, whatever the last one has left.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def runtime_dir():
    """A directory of its own for sockets, with a path short enough for one."""
    path = tempfile.mkdtemp(prefix="burst-test-")
    os.environ["BURST_RUNTIME_DIR"] = path
    yield path
    shutil.rmtree(path, ignore_errors=True)
