"""What the stubs say of the extension modules, which stubtest cannot see into."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def python_of(ctype):
    """How a stub spells a C type."""
    return {"primitive": "int", "pointer": "_Pointer", "function": "_Pointer", "void": "None"}[ctype.kind]


def runtime_signature(module, name):
    """What cffi knows of a constant, or of a function."""
    ffi, value = module.ffi, getattr(module.lib, name)
    if isinstance(value, int):
        return value
    ctype = ffi.typeof(value)
    return [python_of(kind) for kind in ctype.args], python_of(ctype.result)


def stub_signature(node):
    """The same of a member of the stub's class."""
    if isinstance(node, ast.AnnAssign):
        return ast.literal_eval(node.value)
    return [ast.unparse(argument.annotation) for argument in node.args.posonlyargs[1:]], ast.unparse(node.returns)


@pytest.mark.parametrize("module", ["fmq._core", "burst._core"])
def test_the_stub_of_an_extension_is_what_the_extension_holds(module):
    """The stub has each constant with its value, each function with its arguments and result, and nothing else."""
    stub = ast.parse((ROOT / f"{module.replace('.', '/')}.pyi").read_text())
    (library,) = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    told = {getattr(node, "name", None) or node.target.id: stub_signature(node) for node in library.body}
    extension = importlib.import_module(module)
    assert told == {name: runtime_signature(extension, name) for name in dir(extension.lib)}


def test_modules_of_two_builds_are_told_apart():
    """burst._core takes the process of this fmq._core, and none of another version or of other ends."""
    from burst._core import ffi, lib
    from fmq._core import lib as queue

    process = queue.fmq_this_process()
    version, end_bytes = ffi.cast("uint32_t *", process)[0:2]
    assert lib.burst_fits(process) == 0
    for words in [(version + 1, end_bytes, 0), (version, end_bytes + 8, 0)]:
        assert lib.burst_fits(ffi.new("uint32_t[3]", words)) < 0
