"""A model that finds objects in one frame after the other: in memory that the device maps, or in a copy of it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import Memory, Request, RequestArgument
from burst.memory import Usage
from driver.client.job import Job, perform_with_room
from driver.client.workspace import OutputSet
from driver.devices.files import RUNTIMES
from driver.errors import DeviceNotFound
from driver.gateways.detection import DetectionDecoder
from driver.gateways.detection.class_names import labels_of
from driver.gateways.detection.model_types import TYPES
from driver.gateways.gstreamer.frame_layout import layout_of
from driver.importers import load
from driver.importers.files import kind_of
from driver.runtime.compilation import compile as compile_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import Result
    from driver.client.surface import AnyBurst
    from driver.gateways.detection import FoundBoxes

TYPES_OF_ONE = {name: its for name, its in TYPES.items() if its.inputs == 1}
"""The types of models that take a picture and nothing else."""

_MOST_BOXES = 100
_MOST_MEMORIES = 64
"""Of frames, that the device keeps mapped: more than a pool of GStreamer's usually has."""


class FrameOptions(NamedTuple):
    """Properties of the element. scale, mean: a float input is (byte - mean) * scale. timeout: seconds for a frame."""

    model: str
    device: str = ""
    labels: str = ""
    model_type: str = "auto"
    threshold: float = 0.5
    scale: float = 1 / 255
    mean: float = 0.0
    timeout: float = 5.0
    application: str | None = None


class FrameModel:
    """One element's model, from start to stop. One thread at a time."""

    def __init__(self, options: FrameOptions) -> None:
        """Load and compile the model. Raise ValueError, OSError, and what `driver.load` and `driver.compile` raise."""
        if not options.model:
            raise ValueError("model is not set; give the path of an .onnx or .tflite file")
        for name, path in (("model", options.model), ("labels", options.labels)):
            if path and not Path(path).is_file():
                raise ValueError(f"{name}={path}: there is no such file; give its path from / on")
        model = load(options.model, optional=False)
        self.layout = layout_of(model)
        self._decoder = DetectionDecoder(model, options.model, options.model_type, TYPES_OF_ONE, option="model-type=")
        named = next((info.labels for info in model.outputs if info.labels), ())
        self.labels = _labels_in(options.labels) if options.labels else list(named)
        self._options, self._model = options, model
        device = options.device or RUNTIMES.get(kind_of(options.model), "reference")
        try:
            self.compiled = compile_model(model, device=device, progress=False, application=options.application)
        except DeviceNotFound as error:
            raise ValueError(f"device={device}: {error}") from None
        self.burst: AnyBurst | None = None
        self.width = self.height = 0
        self._memories: dict[tuple[int, int], Memory] = {}
        self._requests: dict[tuple[tuple[int, int], int], Request] = {}
        self._outputs: OutputSet | None = None  #: of requests on frames in place
        self._life = ExitStack()

    def configure(self, width: int, height: int, strides: Sequence[int], offsets: Sequence[int]) -> None:
        """Take frames of this form from now on. Runs the model once. Raise ValueError, and what an execution raises."""
        self._end_burst()
        layout, self.width, self.height = self.layout, width, height
        for side, wanted, got in (("width", layout.width, width), ("height", layout.height, height)):
            if wanted not in (None, got):
                raise ValueError(f"{side}={got}: the model takes {wanted}; put videoscale before burstinfer")
        self._strides, self._offsets = list(strides), list(offsets)
        self._shape = layout.shape(width, height)
        self.may_be_in_place = layout.takes_bytes and layout.is_packed(width, height, strides, offsets)
        shapes = [self._shape] if None in self._model.inputs[0].shape else None  # type: ignore[operator]
        self.burst = self._life.enter_context(self.compiled.burst(recover=True, input_shapes=shapes))
        first = self.burst.run(timeout=max(self._options.timeout, 60.0))
        first.raise_for_status()
        try:
            self._decoder.approve(first.outputs, width, height)
        except ValueError as error:
            raise ValueError(f"model={self._options.model}: {error}") from None
        self._outputs = OutputSet(self._model, [np.asarray(output).nbytes for output in first.outputs])

    def _lay_out(self, sizes: Sequence[int]) -> None:
        """Give the requests on frames in place new memory for outputs of these sizes."""
        assert self._outputs is not None
        self._requests.clear()
        self._outputs.lay_out(sizes)

    def detect_in_place(self, fd: int, offset: int, nbytes: int) -> FoundBoxes:
        """Find objects in a frame in shared memory or a DMA-BUF. `nbytes`: from its beginning to the frame's end.

        Raise what an execution raises, and OSError or ValueError for memory that cannot be mapped.
        """
        assert self.burst is not None
        outputs = self._outputs
        assert outputs is not None

        def grown(result: Result) -> Request | None:
            if (sizes := outputs.needed(result.output_shapes)) is None:
                return None
            self._lay_out(sizes)
            return self._request(fd, offset, nbytes)

        try:
            job = Job.of(self._request(fd, offset, nbytes), timeout=self._options.timeout)
            result = perform_with_room(self.burst.perform, job, grown)
            result.raise_for_status()
        except BaseException:  # a device that is late may still write there, into the next frame's answer
            self._lay_out(outputs.sizes)
            raise
        return self._found(result)

    def _request(self, fd: int, offset: int, nbytes: int) -> Request:
        about = os.fstat(fd)
        which = about.st_dev, about.st_ino  # no other memory has these numbers while we hold a descriptor of it
        if (found := self._requests.get((which, offset))) is not None:
            return found
        memory = self._memories.get(which)
        if memory is None or memory.nbytes < nbytes:
            if len(self._memories) >= _MOST_MEMORIES:
                self._forget_frames()
            memory = Memory.from_hardware_buffer(fd, "blob", nbytes, usage=Usage.CPU_READ)
            self._memories[which] = memory
        assert self._outputs is not None
        picture = RequestArgument(offset=offset, length=int(np.prod(self._shape)), dimensions=self._shape)
        request = Request((picture,), self._outputs.arguments, (memory, self._outputs.memory))
        self._requests[which, offset] = request
        return request

    def detect_in_copy(self, data: Any) -> FoundBoxes:
        """Find objects in a copy of a frame that lies elsewhere. Raise what an execution raises, and ValueError."""
        assert self.burst is not None
        frame = self.layout.view(data, self.width, self.height, self._strides, self._offsets)
        self._fill(self.burst.inputs[0], frame)  # type: ignore[arg-type]  # it is not omitted
        result = self.burst.run(timeout=self._options.timeout)
        result.raise_for_status()
        return self._found(result)

    def _found(self, result: Result) -> FoundBoxes:
        threshold = self._options.threshold
        return self._decoder(result.outputs, self.width, self.height, threshold).best(_MOST_BOXES, threshold)

    def _fill(self, target: NDArray[Any], frame: NDArray[np.uint8]) -> None:
        if target.dtype == np.uint8:
            target[...] = frame
        elif target.dtype == np.int8:
            np.bitwise_xor(frame, 0x80, out=target.view(np.uint8))  # byte - 128
        elif self._options.mean:
            np.subtract(frame, np.float32(self._options.mean), out=target, dtype=target.dtype, casting="unsafe")
            target *= target.dtype.type(self._options.scale)
        else:
            np.multiply(frame, target.dtype.type(self._options.scale), out=target)

    def _forget_frames(self) -> None:
        self._requests.clear()
        self._memories.clear()

    def _end_burst(self) -> None:
        self._forget_frames()
        self._life.close()
        self.burst = self._outputs = None

    def close(self) -> None:
        """End the burst, and forget all frames."""
        self._end_burst()
        self.compiled.close()


def _labels_in(path: str) -> list[str]:
    try:
        return labels_of(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"labels={path}: it is not text in UTF-8; give a file of names, one per line") from None
