"""The camera's page for a model of one's own: frames, and what the model answers, in words."""

from __future__ import annotations

import time
from itertools import count
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from PIL import Image

import driver
from driver.cli.images import LETTERBOX, ImageFit, frame_of
from driver.cli.names import loaded
from driver.cli.ports import inputs_of, outputs_of, shape_words
from driver.cli.summaries import brief, brief_words, classes, read_labels, readable, summary
from driver.demos.camera import TIMEOUT, WARM_UP
from driver.demos.camera_sources import clock_of
from driver.demos.drawing import picture
from driver.demos.latencies import TimedCall, timed
from driver.demos.web.board import Update
from driver.demos.web.camera import SIZES, CameraShow, jpeg
from driver.demos.web.settings import SPINS, Held
from driver.devices.files import RUNTIMES
from driver.importers.files import kind_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from numpy.typing import NDArray

    from driver.demos.camera_sources import FrameSource
    from driver.demos.web.stream import Stage

_TOP = 3  # classes of an output that are shown


class ModelShow(CameraShow):
    """Frames of a source through a model file that takes one image."""

    def __init__(
        self,
        path: Path,
        source: str,
        seed: int,
        fps: float,
        *,
        device: str | None,
        out: Path,
        labels: Path | None,
    ) -> None:
        """`device`: None for the file's own runtime. Raise UsageError for a file that the page cannot show."""
        self._model, self._labels = loaded(path), read_labels(labels)
        self._inputs, self._outputs = inputs_of(self._model), outputs_of(self._model)
        shapes = [port.operand.dimensions for port in self._inputs]
        if len(shapes) != 1 or not frame_of(shapes[0]):
            words = ", ".join(map(shape_words, shapes))
            raise click.UsageError(f"--model {path}: the page shows models of one image, and this takes {words}")
        super().__init__(source, seed, fps, device or RUNTIMES[kind_of(path)], out=out)
        self.settings = tuple(setting for setting in self.settings if setting.name != "depth")
        self._fit: ImageFit | None = None

    def play(self, values: Held, stage: Stage) -> Generator[Update, None, None]:
        """Yield frames, what the model answers, and where everything stands."""
        source, size = self._source_for(values["size"], values["fps"]), SIZES[values["size"]]
        frame, self._fit = np.zeros((*source.size[::-1], 3), np.uint8), None
        how: dict[str, Any] = {"measure": True, "recover": True, "spin": SPINS[values["spin"]]}
        with (
            self._source_is_whole(),
            driver.connect(values["device"]) as device,
            device.prepare(self._model, priority=values["priority"]) as prepared,
            prepared.burst(input_shapes=[self._array(frame).shape], **how) as fast,
            self._film(size, values, stage) as film,
        ):
            for _ in range(WARM_UP):
                fast.run(self._array(frame), timeout=TIMEOUT)
            stage.placed(prepared)
            clock = clock_of(source, values["fps"], stage.wait)
            for index in count():
                source.skip(clock.tick())
                shown = _next_frame(source, frame)
                calls, said = self._called(prepared, fast, self._array(shown), last=index % 2 == 1)
                stage.noticed(prepared, calls["burst"].seconds)
                if film is not None:
                    film.add(shown)
                about = {"said": said, "found": [], "size": list(shown.shape[1::-1]), "fps": stage.rate()}
                yield Update(stage.point(calls), about | {"dropped": clock.dropped}, jpeg(shown))

    def _array(self, frame: NDArray[np.uint8]) -> NDArray[Any]:
        """Return the frame as the model takes it."""
        image = Image.fromarray(frame)
        if self._fit is None:
            (port,) = self._inputs
            self._fit = ImageFit(port, port.operand.dimensions, image, "--model", pixels=None, fit=LETTERBOX)
        return self._fit(image)

    def _called(
        self, prepared: driver.RemotePreparedModel, fast: driver.AnyBurst, array: NDArray[Any], *, last: bool
    ) -> tuple[dict[str, TimedCall], list[str]]:
        """Run the model on both paths, the burst first or last; how long each took, and the answer in words."""
        calls, said = {}, list[str]()
        for path in sorted(("burst", "plain RPC"), reverse=last):
            if path == "burst":
                result, calls[path] = timed(lambda: fast.run(array, timeout=TIMEOUT))
                said = self._words(result.outputs)  # before the next run: the outputs are views of shared memory
            else:
                start = time.perf_counter()
                prepared.run(array, timeout=TIMEOUT)
                calls[path] = TimedCall(time.perf_counter() - start, None)
        return calls, said

    def _words(self, outputs: Any) -> list[str]:
        found = []
        for port, array in zip(self._outputs, outputs, strict=True):
            top = [each._asdict() for each in classes(port, array, _TOP, self._labels)]
            found.append(brief_words(port.name, brief(readable(summary(port, array)), top)))
        return found


def _next_frame(source: FrameSource, frame: NDArray[Any]) -> NDArray[Any]:
    source.read(None if source.buffers else frame)
    return picture(source.buffers[source.index]) if source.buffers else frame
