"""fmq <- burst in C: the queue builds and works where there is nothing of the bursts."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUND_TRIP = """
import sys
sys.modules["burst"] = None  # an import of it is an error
import fmq
import numpy as np
queue = fmq.MessageQueue.create("i8", 4)
with queue.writer() as writer, queue.reader() as reader:
    writer.write([1, 2, 3])
    out = np.empty(2, "i8")
    assert reader.read(2, out=out) is out and writer.try_write(out) and reader.try_read(4) is None
    print(fmq.__file__, out, reader.read(3), fmq.Exchange(writer, reader, hold=1e-5)(bytes(8)))
"""


def generate(csrc, folder):
    """What cffi makes of csrc/fmq/api.h."""
    generated = folder / "_core.c"
    command = [sys.executable, "-m", "cffi.gen_src", "read-sources", "fmq._core"]
    subprocess.run([*command, csrc / "fmq/api.h", csrc / "fmq/glue.h", generated], check=True, timeout=500)
    return generated


def build(csrc, folder, name, *sources, define="NOTHING"):
    """An extension module of fmq, from the sources of csrc/fmq alone."""
    include = [f"-I{csrc}", f"-I{sysconfig.get_path('include')}"]
    command = ["cc", "-std=gnu11", "-O1", "-w", "-shared", "-fPIC", f"-D{define}", *include]
    target = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run([*command, *sources, "-o", target, "-pthread"], check=True, timeout=500)


@pytest.mark.integration
@pytest.mark.parametrize("define", ["KNOWN_NUMPY", "FMQ_UNKNOWN_NUMPY"])
def test_the_queue_works_without_the_bursts(csrc, tmp_path, define):
    """fmq and csrc/fmq alone, beside burst_engine, which fmq asks whether it is itself: both extension modules build,
    load with every symbol bound, and move elements; also with a numpy whose arrays are not laid out as C knows them.
    """
    alone, package = tmp_path / "csrc", tmp_path / "fmq"
    shutil.copytree(csrc / "fmq", alone / "fmq")
    for name in ("burst_engine", "fmq"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    build(alone, package, "_core", generate(alone, package), *sorted((alone / "fmq").glob("*.c")))
    build(alone, package, "_hot", *sorted((alone / "fmq/python").glob("*.c")), define=define)
    others = {str(Path(find_spec(name).origin).parent.parent) for name in ("numpy", "cffi")}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *others]), "LD_BIND_NOW": "1"}
    command = [sys.executable, "-S", "-c", ROUND_TRIP]  # without site: an editable install would answer for fmq
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{package / '__init__.py'} [1 2] [3 1 2] {bytes(8)}\n"
