"""Every obstacle of a model file at once: of each form that it may be loaded in, and of each installed device."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from burst import PeerDied, StatusError
from driver.client.device import connect
from driver.devices import missing, names, usable_class
from driver.devices.files import RUNTIMES
from driver.errors import DeviceFailed, DeviceNotFound, ImportFailed, InvalidModel
from driver.importers.files import ModelSource, kind_of
from driver.importers.obstacle import named_sizes
from driver.nn.file_form import FILE

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from driver.client.device import RemoteDevice
    from driver.importers.header import Header
    from driver.importers.obstacle import Obstacle, Shapes
    from driver.nn import Model

_WIDEST = 36, 72
"""Characters of the last two columns of the table."""
_MOST_NAMED = 4
"""Tensors of an operator that the table names."""


@dataclass(frozen=True, slots=True)
class FormObstacle:
    """Why a model file does not run in a form, or not on a device.

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
    """What `driver.check` found. `str()` is a table.

    works: each form in which the model runs, and a device that runs all of it; "cpu" is numpy in the client's process.
    asked: the devices that were asked, and started if they did not run. offers: what the file has beside what was
    checked: inputs that may be left out, and further signatures, in words.
    """

    file: str
    works: tuple[tuple[str, str], ...]
    obstacles: tuple[FormObstacle, ...]
    asked: tuple[str, ...]
    offers: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the model runs in one form at least."""
        return bool(self.works)

    @property
    def summary(self) -> str:
        """Where the model runs, in one sentence."""
        if not self.works:
            return f"{self.file} runs in no form"
        forms = {form: [device for other, device in self.works if other == form] for form, _ in self.works}
        return f"{self.file} runs " + "; ".join(f"{_AS[form]} on {', '.join(on)}" for form, on in forms.items())

    def __str__(self) -> str:
        asked = f"asked: {', '.join(self.asked)}" if self.asked else "no device was asked"
        return "\n".join([self.summary, *self.offers, asked, *(_table(self.obstacles) if self.obstacles else ())])


_AS = {"file": "as it is", "operations": "as operations of the HAL"}


def check(
    path: str | os.PathLike[str], shapes: Shapes | None = None, progress: Callable[[str], object] | None = None
) -> ModelReport:
    """Find everything that keeps a model file from being loaded, or from running on the devices that are installed.

    Devices that do not run are started. Those that run such files as they are prepare the model once, as far as it is
    needed to know whether they take it.

    Args:
        path: of an .onnx or .tflite file.
        shapes: sizes of inputs by name, as for `load`.
        progress: is called with what is done next.

    Raises ImportFailed for another suffix and for shapes that the file does not have, OSError.
    """
    kind, shapes, tell = kind_of(path), named_sizes(shapes), progress or (lambda _: None)
    tell("reading the file")
    found = _Check(Path(path).name, kind)
    try:
        source = ModelSource(Path(path), kind)
    except ImportFailed as error:
        return found.damaged(error)
    header = source.header.with_shapes(shapes)
    found.offers = _offers(Path(path), kind, header)
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
    """What `ModelReport.offers` has."""
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
    """What was found so far."""

    def __init__(self, file: str, kind: str) -> None:
        self._file, self._kind, self._runtime = file, kind, RUNTIMES[kind]
        self.works: list[tuple[str, str]] = []
        self.offers: tuple[str, ...] = ()
        self._obstacles: list[FormObstacle] = []
        self._asked: list[str] = []

    def report(self) -> ModelReport:
        """Where the file runs as it is, devices for files of another kind are left out, and this is the last remedy."""
        works, told = sorted(self.works, key=lambda pair: pair[0]), self._obstacles
        if whole := [device for form, device in works if form == "file"]:
            told = [o for o in told if o.form != "file" or o.device in (None, self._runtime)]
            remedy = f'keep form="auto": {", ".join(whole)} runs the file as it is'
            told = [o if o.remedy or o.device or o.form == "file" else replace(o, remedy=remedy) for o in told]
        return ModelReport(self._file, tuple(works), tuple(told), tuple(self._asked), self.offers)

    def damaged(self, error: ImportFailed) -> ModelReport:
        """The report on a file of which nothing can be read."""
        for form in ("file", "operations"):
            self._obstacles.append(FormObstacle(form, None, None, (), error.reason, error.remedy))
        return self.report()

    def add(self, form: str, obstacles: Sequence[Obstacle]) -> None:
        """Adds what keeps the file from being loaded in a form."""
        for o in obstacles:
            operator = None if o.operator is None else f"{o.operator} {o.number}"
            self._obstacles.append(FormObstacle(form, None, operator, o.tensors, o.reason, o.remedy))

    def miss_runtime(self) -> None:
        """Says so where no installed device knows model files, and what installs the one for files of this kind."""
        if not any(o.form == "file" for o in self._obstacles) and ("file", self._runtime) not in self.works:
            lacks = missing(self._runtime)
            what = f"no device runs .{self._kind} files as they are" + (f": {lacks.what}" if lacks else "")
            remedy = lacks.remedy if lacks else None
            self._obstacles.append(FormObstacle("file", self._runtime, None, (), what, remedy))

    def ask(self, name: str, whole: Model | None, operations: Model | None) -> None:
        """Asks one device about both forms."""
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
            self._obstacles.append(FormObstacle(form, name, None, (), str(error), None))

    def _ask_whole(self, device: RemoteDevice, name: str, model: Model) -> None:
        (reason,) = device.explain(model)
        if reason is None:
            try:
                device.prepare(model).close()
            except (StatusError, PeerDied, InvalidModel) as error:
                reason = str(error)
        if reason is None:
            self.works.append(("file", name))
        else:
            self._obstacles.append(FormObstacle("file", name, None, (), reason, None))

    def _ask_operations(self, device: RemoteDevice, name: str, model: Model) -> None:
        """Reasons that several operations share are told once."""
        pairs = zip(model.main.operations, device.explain(model), strict=True)
        reasons = Counter((operation.type, reason) for operation, reason in pairs if reason is not None)
        for (kind, reason), count in reasons.items():
            operator = kind if count == 1 else f"{count} {kind}"
            self._obstacles.append(FormObstacle("operations", name, operator, (), reason, None))
        if not reasons:
            self.works.append(("operations", name))


def _table(obstacles: Sequence[FormObstacle]) -> list[str]:
    """Columns side by side, long texts in several lines, each remedy below its obstacle."""
    rows = [(["form"], ["device"], ["where"], ["obstacle and remedy"])]
    for o in obstacles:
        told = [line for text in (o.reason, o.remedy or "") for line in textwrap.wrap(text, _WIDEST[1])]
        rows.append(([o.form], [o.device or "any"], textwrap.wrap(o.where, _WIDEST[0]), told))
    widths = [max(len(line) for row in rows for line in row[column]) for column in range(4)]
    lines = [line for row in rows for line in zip_longest(*row, fillvalue="")]
    return ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
