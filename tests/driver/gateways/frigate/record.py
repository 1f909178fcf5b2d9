"""Writes recorded.json anew: what the real module of Frigate's zmq detector sends, what it gets and what it reads.

    FRIGATE_SOURCE=~/frigate python tests/driver/gateways/frigate/record.py

FRIGATE_SOURCE is a checkout of https://github.com/blakeblackshear/frigate. The module is loaded from there with
stand-ins for the rest of Frigate, its socket is replaced by one that writes down each part, and `burst serve` answers.
Parts are packed by zlib, and written in base64.
"""

import base64
import json
import sys
import tempfile
import zlib
from pathlib import Path

import zmq

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from frigate_models import SIZE, frame_of, frigate_source, serving, write_detector  # noqa: E402
from frigate_ssd import SIDE, frame_of_bytes, write_ssd  # noqa: E402
from frigate_stand_ins import plug_in, with_contexts, zmq_config  # noqa: E402

MODULE = "frigate/detectors/plugins/zmq_ipc.py"
RECORDINGS = [  # name, model type, dtype, layout, frames
    ("yolo-generic", "yolo-generic", "float32", "nchw", [("float32", "nchw", 0.5), ("float32", "nchw", 0.0)]),
    ("ssd", "ssd", "uint8", "nhwc", [("uint8", "nhwc", 0.2), ("uint8", "nhwc", 1.0)]),
    ("dfine", "dfine", "float32", "nchw", [("float32", "nchw", 0.25)]),
    ("wrong-type-of-frame", "yolox", "float32", "nchw", [("uint8", "nchw", 0.2), ("float32", "nhwc", 0.2)]),
]


def _recorded(parts):
    return [base64.b64encode(zlib.compress(bytes(part), 9)).decode() for part in parts]


class RecordingContext:
    """Its sockets write down what passes."""

    def __init__(self, exchanges):
        self._context, self._exchanges = zmq.Context(), exchanges

    def socket(self, kind):
        return RecordingSocket(self._context.socket(kind), self._exchanges)

    def end(self):
        self._context.destroy(linger=0)


class RecordingSocket:
    """Passes everything on."""

    def __init__(self, socket, exchanges):
        self._socket, self._exchanges = socket, exchanges

    def __getattr__(self, name):
        return getattr(self._socket, name)

    def send_multipart(self, parts):
        self._exchanges.append({"sent": _recorded(parts)})
        self._socket.send_multipart(parts)

    def recv_multipart(self):
        parts = self._socket.recv_multipart()
        self._exchanges[-1]["got"] = _recorded(parts)
        return parts


def record(module, served, model, size, frames):
    """One recording: a detector that begins, and looks at the frames. served: device, address, model type."""
    exchanges, read = [], []
    context = RecordingContext(exchanges)
    with_contexts(module, lambda: context)
    device, address, model_type = served
    with serving(device, address, model, model_type):
        detector = module.ZmqIpcDetector(zmq_config(address, model, model_type, size))
        for pixel, frame in frames:
            read.append({"pixel": pixel, "shape": list(detector.detect_raw(frame).shape)})
        context.end()
    return {"device": device, "model": model.name, "model_type": model_type, "exchanges": exchanges, "read": read}


def record_each(module, folder):
    """The recordings by name."""
    for name, model_type, dtype, layout, frames in RECORDINGS:
        model = write_detector(folder / f"{name}.onnx", model_type, dtype, layout)
        its = [(pixel, frame_of(pixel, kind, its_layout)) for kind, its_layout, pixel in frames]
        served = "onnxruntime", f"ipc://{folder}/{name}", model_type
        yield name, record(module, served, model, SIZE, its) | {"dtype": dtype, "layout": layout}
    served = "litert", f"ipc://{folder}/litert", "ssd"
    frames = [(pixel, frame_of_bytes(pixel)) for pixel in (0.2, 1.0)]
    yield "ssd-litert", record(module, served, write_ssd(folder / "ssd.tflite"), SIDE, frames)


def main():
    source = frigate_source()
    if not source:
        raise SystemExit("set FRIGATE_SOURCE to a checkout of https://github.com/blakeblackshear/frigate")
    module = plug_in(Path(source) / MODULE, "zmq_ipc")
    with tempfile.TemporaryDirectory() as folder:
        found = dict(record_each(module, Path(folder)))
    (HERE / "recorded.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
