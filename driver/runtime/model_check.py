"""Every obstacle of a model file at once: of each form that it may be loaded in, and of each installed device."""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burst import BurstError, PeerDied, StatusError
from driver.client.device import connect
from driver.devices import missing, names, usable_class
from driver.devices.files import RUNTIMES
from driver.errors import DeviceFailed, DeviceNotFound, DriverError, ImportFailed, InvalidModel
from driver.importers.files import ModelSource, kind_of
from driver.importers.obstacle import named_sizes
from driver.nn.file_form import FILE, tensor_type
from driver.runtime.frame_cost import FrameCost, frame_cost

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from driver.client.device import RemoteDevice
    from driver.client.prepared_model import RemotePreparedModel
    from driver.importers.header import Header, HeaderTensor
    from driver.importers.obstacle import Obstacle, Shapes
    from driver.nn import Model

    Shape = tuple[int, ...]

_WIDEST = 36, 72
"""Characters of the last two columns of the table."""
_EXAMPLE = re.compile(r"(fix (its|the) sizes) with, for example, shapes=")
"""The remedy of an importer, with sizes that it has made up."""
_NO_RUN = "give sizes that it runs with (shapes=, --shape), or check it without a run (run=False, --no-run)"
_PATIENCE = 30.0
"""Seconds that the runs on zeros of one device may take together."""
_USUAL = 1, 64, 320, 512
"""Open sizes that are tried, one after the other."""
_MOST_ZEROS = 1 << 24
"""The most elements of all inputs together that are tried."""
_MOST_NAMED = 4
"""Tensors of an operator that the table names."""


@dataclass(frozen=True, slots=True)
class FormObstacle:
    """A reason why a model file does not run in a form, or not on a device.

    form: "file" or "operations". device: None where it is the file that cannot be loaded in this form. operator: its
    kind and number, or how many there are of the kind; None when the whole file is concerned. tensors: by name.
    """

    form: str
    device: str | None
    operator: str | None
    tensors: tuple[str, ...]
    reason: str
    remedy: str | None

    @property
    def where(self) -> str:
        """The operator and its tensors, in a few words."""
        named = ", ".join([*self.tensors[:_MOST_NAMED], *["…"] * (len(self.tensors) > _MOST_NAMED)])
        return f"{self.operator or 'the file'}: {named}" if named else self.operator or "the file"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The findings of `driver.check`. `str()` is a table.

    works: each form in which the model runs, and a device that runs all of it; "cpu" is numpy in the client's process.
    asked: the devices that were asked, and started if they did not run. offers: what the file has beside what was
    checked: inputs that may be left out, and further signatures, in words. costs: of a frame, where the file ran.
    """

    file: str
    works: tuple[tuple[str, str], ...]
    obstacles: tuple[FormObstacle, ...]
    asked: tuple[str, ...]
    offers: tuple[str, ...] = ()
    costs: tuple[FrameCost, ...] = ()

    @property
    def ok(self) -> bool:
        """True if the model runs in one form at least."""
        return bool(self.works)

    @property
    def summary(self) -> str:
        """The places where the model runs, in one sentence."""
        if not self.works:
            return f"{self.file} runs in no form"
        forms = {form: [device for other, device in self.works if other == form] for form, _ in self.works}
        return f"{self.file} runs " + "; ".join(f"{_AS[form]} on {', '.join(on)}" for form, on in forms.items())

    def __str__(self) -> str:
        asked = f"asked: {', '.join(self.asked)}" if self.asked else "no device was asked"
        told = (self.summary, *map(str, self.costs), *self.offers, asked)
        return "\n".join([*told, *(_table(self.obstacles) if self.obstacles else ())])


_AS = {"file": "as it is", "operations": "as operations of the HAL"}


def check(
    path: str | os.PathLike[str],
    shapes: Shapes | None = None,
    progress: Callable[[str], object] | None = None,
    *,
    signature: str | None = None,
    run: bool = True,
) -> ModelReport:
    """Find everything that keeps a model file from being loaded, or from running on the devices that are installed.

    Devices that do not run are started. Those that run such files as they are prepare the model and run it once, on
    zeros, for half a minute at most; a size that stays open is 1 there, or else another that is usual.

    Args:
        path: of an .onnx or .tflite file.
        shapes: sizes of inputs by name, as for `load`.
        progress: is called with what is done next.
        signature: the entry of a .tflite file that has several, as for `load`.
        run: False: files are only prepared, and are said to run if a device has taken them.

    Raise ImportFailed for another suffix and for shapes that the file does not have, OSError.
    """
    kind, shapes, tell = kind_of(path), named_sizes(shapes), progress or (lambda _: None)
    tell("reading the file")
    found = _Check(Path(path).name, kind)
    try:
        source = ModelSource(Path(path), kind, signature)
    except ImportFailed as error:
        return found.damaged(error)
    header = source.header.with_shapes(shapes)
    found.offers = _offers(Path(path), kind, header)
    found.inputs = header.without_optional().inputs if run else None
    found.add("file", header.refusals)
    whole = None if header.refusals else source.model(header)
    operations, obstacles = source.converted(shapes)
    found.add("operations", obstacles)
    if whole is not None or operations is not None:
        for name in names():
            tell(f"asking {name}")
            found.ask(name, whole, operations)
    if operations is not None:
        found.works.append(("operations", "cpu"))
    if whole is not None:
        found.miss_runtime()
    return found.report()


def _offers(path: Path, kind: str, header: Header) -> tuple[str, ...]:
    """Return the value of `ModelReport.offers`."""
    others = [(name, ModelSource(path, kind, name).header) for name in header.signatures if name != header.signature]
    optional = [f"input {t}, which may be left out" for t in header.inputs if t.extra.get("optional")]
    return (
        *optional,
        *(
            f"signature {name}: {', '.join(map(str, its.inputs))} -> {', '.join(map(str, its.outputs))}"
            for name, its in others
        ),
    )


class _Check:
    """The findings so far."""

    def __init__(self, file: str, kind: str) -> None:
        self._file, self._kind, self._runtime = file, kind, RUNTIMES[kind]
        self.works: list[tuple[str, str]] = []
        self.offers: tuple[str, ...] = ()
        self._costs: list[FrameCost] = []
        self.inputs: Sequence[HeaderTensor] | None = None  #: of the run on zeros; None: there is none
        self._feeds: dict[str, Any] = {}  #: of the last run on zeros
        self._ran: dict[str, Shape] | None = (
            None  #: sizes that ran; none where no run succeeded; None: no run was tried
        )
        self._obstacles: list[FormObstacle] = []
        self._asked: list[str] = []

    def report(self) -> ModelReport:
        """Return the report.

        Where the file runs as it is, devices for files of another kind are left out, and to run it so is the last
        remedy.
        """
        works, told = sorted(self.works, key=lambda pair: pair[0]), self._obstacles
        if whole := [device for form, device in works if form == "file"]:
            told = [o for o in told if o.form != "file" or o.device in (None, self._runtime)]
            remedy = f'keep form="auto": {", ".join(whole)} runs the file as it is'
            told = [o if o.remedy or o.device or o.form == "file" else replace(o, remedy=remedy) for o in told]
        told = [replace(o, remedy=self._tried(o.remedy)) for o in told]
        asked, costs = tuple(self._asked), tuple(self._costs)
        return ModelReport(self._file, tuple(works), tuple(told), asked, offers=self.offers, costs=costs)

    def _tried(self, remedy: str | None) -> str | None:
        """Return the remedy with sizes that ran in the place of an example; with ? where none did."""
        words = _EXAMPLE.match(remedy or "")
        if words is None or self._ran is None or not self.inputs:
            return remedy
        is_open = {t.name: t.shape or () for t in self.inputs if t.shape is None or 0 in t.shape}
        sizes = {name: self._ran.get(name, tuple(d or "?" for d in shape)) for name, shape in is_open.items()}
        return f"{words[1]} with{', for example,' if self._ran else ''} shapes={sizes!r}"

    def damaged(self, error: ImportFailed) -> ModelReport:
        """Return the report on a file of which nothing can be read."""
        for form in ("file", "operations"):
            self._obstacles.append(FormObstacle(form, None, None, (), reason=error.reason, remedy=error.remedy))
        return self.report()

    def add(self, form: str, obstacles: Sequence[Obstacle]) -> None:
        """Add what keeps the file from being loaded in a form."""
        for o in obstacles:
            operator = None if o.operator is None else f"{o.operator} {o.number}"
            self._obstacles.append(FormObstacle(form, None, operator, o.tensors, reason=o.reason, remedy=o.remedy))

    def miss_runtime(self) -> None:
        """Note that no installed device knows model files, if so, and what installs the one for files of this kind."""
        if not any(o.form == "file" for o in self._obstacles) and ("file", self._runtime) not in self.works:
            lacks = missing(self._runtime)
            what = f"no device runs .{self._kind} files as they are" + (f": {lacks.what}" if lacks else "")
            remedy = lacks.remedy if lacks else None
            self._obstacles.append(FormObstacle("file", self._runtime, None, (), reason=what, remedy=remedy))

    def ask(self, name: str, whole: Model | None, operations: Model | None) -> None:
        """Ask one device about both forms."""
        try:
            usable_class(name)
            with connect(name) as device:
                self._asked.append(name)
                if whole is not None and FILE.name in device.extensions:
                    self._ask_whole(device, name, whole)
                if operations is not None:
                    self._ask_operations(device, name, operations)
        except (DeviceNotFound, DeviceFailed, PeerDied, StatusError) as error:
            form = "operations" if whole is None else "file"
            self._obstacles.append(FormObstacle(form, name, None, (), reason=str(error), remedy=None))

    def _ask_whole(self, device: RemoteDevice, name: str, model: Model) -> None:
        (reason,) = device.explain(model)
        remedy = None
        if reason is None:
            try:
                with device.prepare(model) as prepared:
                    reason = None if self.inputs is None else self._run_on_zeros(prepared, self.inputs)
                    if reason is None and self._feeds:
                        self._measure(device, name, prepared)
                remedy = _NO_RUN if reason else None
            except (StatusError, PeerDied, InvalidModel) as error:
                reason = str(error)
        if reason is None:
            self.works.append(("file", name))
        else:
            self._obstacles.append(FormObstacle("file", name, None, (), reason=reason, remedy=remedy))

    def _run_on_zeros(self, prepared: RemotePreparedModel, inputs: Sequence[HeaderTensor]) -> str | None:
        """Return why no run succeeded, of which the last one is told; None: one did."""
        fault, until = "it was loaded, and not run: no zeros fit its inputs", time.monotonic() + _PATIENCE
        self._ran, self._feeds = self._ran or {}, {}
        for sizes in _sizes_to_try(inputs):
            said = ", ".join(f"{name}={'x'.join(map(str, shape)) or 'scalar'}" for name, shape in sizes.items())
            try:
                feeds: Any = {t.name: _zeros(t, sizes[t.name]) for t in inputs}
                prepared.run(feeds, timeout=max(0.1, until - time.monotonic()))
            except (BurstError, DriverError, ValueError, TypeError) as error:
                fault = f"it was loaded, but a run on zeros of {said:.200} failed: {error}"
            else:
                self._ran, self._feeds = self._ran or sizes, feeds
                return None
            if time.monotonic() > until:
                break
        return fault

    def _measure(self, device: RemoteDevice, name: str, prepared: RemotePreparedModel) -> None:
        """Measure a stream of such runs; whatever keeps that from going well is no obstacle of the file."""
        sizes = {given: array.shape for given, array in self._feeds.items()}
        with suppress(BurstError, DriverError, ValueError, TypeError, OSError):
            with prepared.burst(input_shapes=sizes) as burst:
                found = frame_cost(partial(burst.run, self._feeds), (device.service_pid, device.engine_pid))
            self._costs.append(FrameCost("file", name, *found))

    def _ask_operations(self, device: RemoteDevice, name: str, model: Model) -> None:
        """Ask a device about the operations. Reasons that several operations share are told once."""
        pairs = list(zip(model.main.operations, device.explain(model), strict=True))
        if pairs and FILE.name in device.extensions and len({reason for _, reason in pairs}) == 1 and pairs[0][1]:
            self._obstacles.append(FormObstacle("operations", name, None, (), reason=pairs[0][1], remedy=None))
            return
        reasons = Counter((operation.type, reason) for operation, reason in pairs if reason is not None)
        for (kind, reason), count in reasons.items():
            operator = kind if count == 1 else f"{count} {kind}"
            self._obstacles.append(FormObstacle("operations", name, operator, (), reason=reason, remedy=None))
        if not reasons:
            self.works.append(("operations", name))


def _sizes_to_try(inputs: Sequence[HeaderTensor]) -> Iterator[dict[str, Shape]]:
    """Yield sizes for all inputs, the usual ones for open sizes: first with 1 for the first of each, the batch."""
    is_open = any(t.shape is None or 0 in t.shape for t in inputs)
    for batch, usual in [*((1, size) for size in _USUAL), *((size, size) for size in _USUAL[1:])][
        : None if is_open else 1
    ]:
        symbols: dict[str, int] = {}
        found = {t.name: _filled(t, batch, usual, symbols) for t in inputs}
        if sum(math.prod(shape) for shape in found.values()) <= _MOST_ZEROS:
            yield found


def _filled(tensor: HeaderTensor, batch: int, usual: int, symbols: dict[str, int]) -> Shape:
    """Return the shape of an input: `batch` for the first open size, and `usual` for the others.

    A size that `symbols` has is taken from there.
    """
    shape = list((1,) if tensor.shape is None else tensor.shape)
    names = (*tensor.sizes.symbols, *[""] * len(shape))
    first = shape.index(0) if 0 in shape else -1
    for axis, size in enumerate(shape):
        if not size:
            wanted = batch if axis == first else usual
            shape[axis] = symbols.setdefault(names[axis], wanted) if names[axis] else wanted
    return tuple(shape)


def _zeros(tensor: HeaderTensor, shape: Shape) -> NDArray[Any]:
    """Return zeros, or empty texts. Raise ValueError for what is no tensor."""
    if tensor.dtype == "packed":
        if tensor.extra["type"] != "tensor(string)":
            raise ValueError(f"{tensor.name} is {tensor.extra['type']}, of which there are no zeros")
        return np.full(shape, "", object)
    return np.zeros(shape, tensor_type(tensor.dtype, len(shape)).dtype)


def _table(obstacles: Sequence[FormObstacle]) -> list[str]:
    """Return lines with columns side by side, long texts in several lines, each remedy below its obstacle."""
    rows = [(["form"], ["device"], ["where"], ["obstacle and remedy"])]
    for o in obstacles:
        told = [line for text in (o.reason, o.remedy or "") for line in textwrap.wrap(text, _WIDEST[1])]
        rows.append(([o.form], [o.device or "any"], textwrap.wrap(o.where, _WIDEST[0]), told))
    widths = [max(len(line) for row in rows for line in row[column]) for column in range(4)]
    lines = [line for row in rows for line in zip_longest(*row, fillvalue="")]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
