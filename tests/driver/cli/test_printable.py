"""Text of model files and of other programs moves nothing on the terminal of whoever runs `burst`."""

import ast
import logging
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from onnx import TensorProto, helper

import driver.cli
from driver.service.bounded_log import BoundedHandler
from fmq.printable import printable, printable_line

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x1b]52;c;cm0=\x07\x9b5n\u202eexe.\r[link=x]"
"""Sets the title, clears, writes to the clipboard, asks for a report, reorders, overwrites; and rich's markup."""


def model_file(folder, operator="Relu"):
    """A file whose names are hostile, under a hostile name."""
    x, y = (helper.make_tensor_value_info(f"{name}{HOSTILE}", TensorProto.FLOAT, [2]) for name in "xy")
    node = helper.make_node(operator, [x.name], [y.name], name=HOSTILE)
    model = helper.make_model(helper.make_graph([node], HOSTILE, [x], [y]), producer_name=HOSTILE)
    model.opset_import[0].version, model.ir_version = 13, 8
    path = folder / f"net\x1b]0;owned\x07{operator.isalpha()}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def on_a_terminal(*arguments):
    """Run `burst` on a terminal of its own; return all that the terminal got."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "driver.cli", *arguments], stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    ):
        os.close(theirs)
        found = b""
        with suppress(OSError):  # the last process has closed it
            while chunk := os.read(ours, 1 << 16):
                found += chunk
    os.close(ours)
    return found


@pytest.mark.integration
@pytest.mark.parametrize("operator", ["Relu", f"Relu{HOSTILE}"])
@pytest.mark.parametrize("command", [("check",), ("run",), ("run", "--json")], ids=" ".join)
def test_names_in_a_file_do_nothing_to_the_terminal(tmp_path, command, operator):
    """Whatever a file's tensors, operators, graph and path are called, no command of ours hands it to the terminal."""
    found = on_a_terminal(*command, str(model_file(tmp_path, operator)))
    assert b"owned" in found
    assert b"\x1b]" not in found
    assert b"\x1b[2J" not in found
    text = found.decode()
    assert not {"\x07", "\x9b", "\u202e"} & set(text)
    assert "exe.\r" not in text


def test_a_log_record_is_one_line_and_printable():
    """What a client makes a process log moves nothing and forges no record; a traceback keeps its lines."""
    lines = []
    handler = BoundedHandler(lines.append, "a log", "%(message)s")
    handler.emit(logging.makeLogRecord({"msg": "said %s", "args": (f"a\n2026 {HOSTILE}",)}))
    try:
        os.stat(f"\n{HOSTILE}")
    except FileNotFoundError as error:
        error.strerror = HOSTILE
        handler.emit(logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()}))
    first, second = (line.decode() for line in lines)
    assert first.count("\n") == 1
    assert second.count("\n") > 2
    assert all(c == "\n" or c.isprintable() for c in first + second)


def test_printable_shows_what_it_replaces():
    """An ASCII control character becomes its picture, all else that is not printable U+FFFD; printable text stays."""
    assert printable("a\x1b[0m\x7f\u202e é\u65e5") == "a\u241b[0m\u2421\ufffd é\u65e5"
    assert printable("a\n\tb\r", "\n\t") == "a\n\tb\u240d"
    assert printable_line(b" a\n\xff\x1b  b ") == "a \ufffd\u241b b"


@pytest.mark.sources
def test_commands_print_in_one_place():
    """Each sub-command prints through driver/cli/output.py; completion.py prints shell code that is our own."""
    found = []
    for path in Path(driver.cli.__file__).parent.glob("*.py"):
        if path.name in {"output.py", "completion.py", "entry.py"}:
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        found += [
            f"{path.name}: {ast.unparse(c)}" for c in calls if ast.unparse(c.func) in {"print", "click.echo", "Console"}
        ]
    assert found == []
