"""Writes the stored bytes of a release: run it with that release installed, from a folder without its sources.

    python3 -m venv clean && clean/bin/pip install burst-engine==X.Y.Z onnxruntime
    clean/bin/python -P tests/stored/write.py tests/stored/X.Y.Z

Each release has a folder of its own, whose bytes never change. That of 0.1.0 was written by this script as it was
then, at commit bf58413. A test runs it, so that it keeps up with the sources.
"""

import json
import os
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

import burst
import driver
import fmq
from burst import wire
from burst.messages import ErrorStatus, OutputShape, RequestArgument, Timing
from driver.protocol.model_codec import encode
from driver.recording import record


def model():
    """FULLY_CONNECTED with weights, and an ADD: constants in the memory beside the structure, two operations."""
    m = driver.ModelBuilder()
    x = m.input("float32", (1, 4))
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = m.operation("FULLY_CONNECTED", x, w, np.ones(3, np.float32), 0)
    m.output(m.operation("ADD", y, y, 1))
    return m.build()


def packets():
    """By name: requests and results of both wire versions."""
    arguments = {"inputs": (RequestArgument(False, 0, 0, 16, ()), RequestArgument(True)), "slots": (7,)}
    output = (RequestArgument(False, 0, 64, 12, (1, 3)),)
    one = wire.RequestPacket(**arguments, outputs=output, measure=True)
    two = one._replace(slots=(wire.Token(5),), loop_timeout=9, id=3, deadline=10**12)
    shapes = (OutputShape((1, 3)),)
    done = wire.ResultPacket(ErrorStatus.NONE, shapes, Timing(5, 8))
    late = wire.ResultPacket(ErrorStatus.MISSED_DEADLINE_TRANSIENT, (), Timing(), id=3)
    small = wire.ResultPacket(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((2, 3), False),), Timing())
    return {
        "request-1": wire.encode_request(one, 1),
        "request-2": wire.encode_request(two, 2),
        "result-1": wire.encode_result(done, 1),
        "result-2": wire.encode_result(done._replace(id=3), 2),
        "late-1": wire.encode_result(late._replace(id=0), 1),
        "late-2": wire.encode_result(late, 2),
        "insufficient-1": wire.encode_result(small, 1),
    }


def queue(folder):
    """A queue with three elements that no reader has taken: its descriptor, and its memory."""
    with fmq.MessageQueue.create(np.dtype("<u4"), 8) as made:
        writer = made.writer()
        writer.write(np.array([11, 22, 33], "<u4"))
        plain, fds = made.descriptor.to_wire()
        size = os.fstat(fds[0]).st_size
        (folder / "queue.memory").write_bytes(os.pread(fds[0], size, 0))
    return plain


def structure(folder):
    """A model as it goes to a device: the memory, and where its structure lies."""
    encoded = encode(model())
    (folder / "model.memory").write_bytes(os.pread(encoded.fd, os.fstat(encoded.fd).st_size, 0))
    return encoded.where


def requests(folder):
    """A recording of three requests in a burst."""
    with (
        record(folder / "requests.burst"),
        driver.connect("reference") as device,
        device.prepare(model()) as prepared,
        prepared.burst() as one,
    ):
        return [one.run(np.full((1, 4), n, np.float32)).outputs[0].tolist() for n in range(3)]


def compilations(folder):
    """The folder of the compilation cache after one model."""
    driver.compile(model(), ["onnxruntime"], cache_dir=folder / "compiled", cache_token=b"c" * 32).close()


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    known = {"release": version("burst-engine")}
    known["names"] = {package.__name__: sorted(package.__all__) for package in (fmq, burst, driver)}
    known["packets"] = {name: packet.hex() for name, packet in packets().items()}
    known["descriptor"] = queue(folder)
    known["model"] = structure(folder)
    known["results"] = requests(folder)
    compilations(folder)
    (folder / "known.json").write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
