"""A device that writes down what the engine tells it: each call is a line of JSON in "heard" in BURST_RUNTIME_DIR."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_test_devices import runtime_folder
from burst_test_devices.odd import Slow
from driver.deadlines import deadline
from driver.devices.reference import ReferenceDevice
from driver.interface import BoundExecution, PreparedModel, Saved

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation
    from driver.nn import Model
    from driver.options import Preference


def note(what: str, **said: object) -> None:
    """Appends a line: one write, so that lines of several threads do not mix."""
    line = json.dumps({"what": what, **said}) + "\n"
    fd = os.open(Path(os.environ["BURST_RUNTIME_DIR"], "heard"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(fd, line.encode())
    os.close(fd)


class Listening(ReferenceDevice):
    """The reference device, which writes down what it is told."""

    needs = runtime_folder.needs()

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device does."""
        note("prepare", preference=preparation.preference, deadline=preparation.deadline)
        return ListeningModel(super().prepare(model, preparation))

    def rest(self) -> None:
        note("rest")


class KeepingModels(Listening):
    """Its models are kept in cache files."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device does."""
        return KeptModel(ReferenceDevice.prepare(self, model, preparation))


class ChoosingThreads(KeepingModels):
    """Runs models in two threads if it is not told otherwise, and four times as fast in one."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device does."""
        note("prepare", threads=preparation.threads)
        return ThreadedModel(ReferenceDevice.prepare(self, model, preparation), preparation.threads or 2)


class Improving(Listening):
    """Makes a better plan of a model once the first one has run three times."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """The first plan."""
        return QuickModel(ReferenceDevice.prepare(self, model, preparation))


class Dozing(Slow):
    """As Slow; hears of rest."""

    needs = runtime_folder.needs()

    def rest(self) -> None:
        note("rest")


class Rude(Listening):
    """Fails in every hint."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device does."""
        return RudeModel(ReferenceDevice.prepare(self, model, preparation))

    def rest(self) -> None:
        note("rest")
        raise RuntimeError("no rest for the wicked")


class ListeningModel(PreparedModel):
    """One model."""

    plan = "first"

    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared, self.is_static, self.serves_all = prepared, prepared.is_static, prepared.serves_all

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        note("bind", priority=options.priority, loop_timeout=options.loop_timeout)
        return ListeningExecution(self._prepared.bind(inputs, outputs, options))

    def burst_began(self, preference: Preference) -> None:
        note("burst_began", preference=preference, plan=self.plan)

    def burst_ended(self) -> None:
        note("burst_ended", plan=self.plan)


class KeptModel(ListeningModel):
    """One that can be kept."""

    def saved(self, root: NDArray[np.uint8]) -> Saved:
        return Saved()


class ThreadedModel(KeptModel):
    """One that runs in so many threads."""

    def __init__(self, prepared: PreparedModel, threads: int) -> None:
        super().__init__(prepared)
        self.threads = threads

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        note("bind", threads=self.threads)
        return ThreadedExecution(self._prepared.bind(inputs, outputs, options), self.threads)


class QuickModel(ListeningModel):
    """The first plan."""

    improves_after = 3

    def improved(self, preparation: Preparation) -> PreparedModel:
        better = ListeningModel(self._prepared)
        better.plan = "better"
        return better


class RudeModel(ListeningModel):
    """Fails in every hint, each time in another way."""

    def burst_began(self, preference: Preference) -> None:
        super().burst_began(preference)
        raise RuntimeError("no burst is welcome")

    def burst_ended(self) -> None:
        super().burst_ended()
        sys.exit("no burst may leave")

    def rest(self) -> None:
        raise ValueError("no model rests")


class ListeningExecution(BoundExecution):
    """One execution."""

    def __init__(self, bound: BoundExecution) -> None:
        self._bound, self.shapes = bound, bound.shapes

    def run(self) -> None:
        note("run", deadline=deadline())
        self._bound.run()
        self.shapes = self._bound.shapes


class ThreadedExecution(ListeningExecution):
    """One execution in so many threads."""

    def __init__(self, bound: BoundExecution, threads: int) -> None:
        super().__init__(bound)
        self._seconds = 1e-3 * threads**2

    def run(self) -> None:
        time.sleep(self._seconds)
        super().run()
