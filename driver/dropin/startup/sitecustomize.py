"""Installs the hook of `burst exec` at the start of a Python, and then runs the program's own sitecustomize."""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(name: str, path: str) -> None:
    """Execute a file as the module of that name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != _HERE]
try:
    _run("_burst_exec_hook", os.path.join(os.path.dirname(_HERE), "hook.py"))
    sys.modules["_burst_exec_hook"].install()
except Exception as error:  # noqa: BLE001 - whatever it is, the program runs
    print(f"burst exec: the program runs without Burst: {error}", file=sys.stderr)

if _found := importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path):
    if _found.origin:
        _run("sitecustomize", _found.origin)
else:
    del sys.modules["sitecustomize"]
    raise ImportError("no other sitecustomize", name="sitecustomize")  # as in a Python that has none
