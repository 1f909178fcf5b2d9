"""What `import fmq` gives, and that it is what fmq says it gives."""

import importlib
import inspect
import subprocess
import sys

import fmq


def test_all_is_sorted_and_complete():
    """Every public name of the package that is not a module is in __all__, in order, and nothing else is."""
    public = [name for name, value in vars(fmq).items() if not name.startswith("_") and not inspect.ismodule(value)]
    assert fmq.__all__ == sorted(set(public))


def test_every_public_name_is_documented():
    """Each class and function says what it is; each public method too."""
    for name in fmq.__all__:
        thing = getattr(fmq, name)
        assert inspect.getdoc(thing), name
        for member, value in vars(thing).items() if inspect.isclass(thing) else ():
            if callable(value) and not member.startswith("_"):
                assert inspect.getdoc(value), f"{name}.{member}"


def test_the_error_tree_in_the_docstring_is_the_tree():
    """fmq.errors draws each class with its extra base."""
    errors = importlib.import_module("fmq.errors")
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, fmq.FmqError) and kind is not fmq.FmqError:
            extra = [base.__name__ for base in kind.__bases__ if base is not fmq.FmqError]
            drawn = f"── {name} ({extra[0]})" if extra else f"── {name} "
            assert drawn in errors.__doc__
            assert name in fmq.__all__


def test_importing_starts_nothing():
    """No thread, no descriptor, no shared memory, and none of the packages above."""
    script = """
import os, sys
before = len(os.listdir("/proc/self/fd"))
import numpy
import fmq
assert len(os.listdir("/proc/self/fd")) == before, os.listdir("/proc/self/fd")
assert [open(f"/proc/self/task/{t}/comm").read() for t in os.listdir("/proc/self/task")].count("fmq-life\\n") == 0
assert not {"burst", "driver"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
