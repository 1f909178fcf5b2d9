"""Devices that are odd on purpose, for tests of everything around a device.

Connect to "burst_test_devices.odd:Slow". Each is the reference device with one thing changed.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from burst.run_queue import checkpoint
from burst_test_devices import runtime_folder
from driver.devices.reference import ReferenceDevice
from driver.errors import ExecutionFailed
from driver.interface import BoundExecution, CacheFiles, PreparedModel, Saved
from driver.nn.validate import required_version
from fmq._core import lib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from driver.interface import BindOptions, Preparation, State
    from driver.nn import Model

_MOST = 10.0  # seconds that an execution takes
_PREPARATION = 3.0
_THOROUGHNESS = 0.5


class Broken(ReferenceDevice):
    """Cannot be started."""

    def __init__(self) -> None:
        raise RuntimeError("this device is broken on purpose")


class Hollow(ReferenceDevice):
    """Starts in the service, and not in the engine."""

    def __init__(self) -> None:
        if not gc.isenabled():  # there garbage is collected between bursts alone
            raise RuntimeError("this engine is broken on purpose")


class Curious(ReferenceDevice):
    """Reads a file that it has not named, when it prepares a model."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        Path("/etc/hosts").read_text()
        return super().prepare(model, preparation)


class Prying(ReferenceDevice):
    """Reads a file that it has not named, when it starts."""

    def __init__(self) -> None:
        Path("/etc/hosts").read_text()
        super().__init__()


class Moody(ReferenceDevice):
    """Has the status that the file "status" in BURST_RUNTIME_DIR says, a state and a reason, once it gets SIGUSR1."""

    needs = runtime_folder.needs()

    def __init__(self) -> None:
        signal.signal(signal.SIGUSR1, self._look)

    def _look(self, *_: object) -> None:
        state, reason = Path(os.environ["BURST_RUNTIME_DIR"], "status").read_text().split(" ", 1)
        self.report(cast("State", state), reason)


class Picky(ReferenceDevice):
    """Knows no MUL."""

    def supported_operations(self, model: Model) -> list[bool]:
        """True for everything else."""
        return [operation.type != "MUL" for operation in model.main.operations]


class Special(ReferenceDevice):
    """Knows no ADD, by which devices are measured."""

    def supported_operations(self, model: Model) -> list[bool]:
        return [operation.type != "ADD" for operation in model.main.operations]


class Straight(ReferenceDevice):
    """Knows neither control flow nor MUL."""

    def supported_operations(self, model: Model) -> list[bool]:
        """True for everything else."""
        return [operation.type not in {"IF", "WHILE", "MUL"} for operation in model.main.operations]


class Old(ReferenceDevice):
    """Speaks HAL 1.0, and fails over whatever is newer."""

    hal_version = "1.0"

    def supported_operations(self, model: Model) -> list[bool]:
        """True for all."""
        _check_old(model)
        return super().supported_operations(model)

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        _check_old(model)
        return super().prepare(model, preparation)


def _check_old(model: Model) -> None:
    newer = [operand.type.name for operand in model.main.operands if operand.type.since]
    if required_version(model) or newer:
        raise RuntimeError(f"a driver of HAL 1.0 was given HAL 1.{required_version(model)}, {newer}")


class Copying(ReferenceDevice):
    """Takes constants in no pool of a client but those of the kind "mmap_fd"."""

    memory_kinds = frozenset({"mmap_fd"})


class Refusing(ReferenceDevice):
    """Promises everything, and prepares no MUL."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares what has none."""
        if any(operation.type == "MUL" for operation in model.main.operations):
            raise RuntimeError("this device refuses on purpose")
        return super().prepare(model, preparation)


class Failing(ReferenceDevice):
    """Fails an execution whose first input begins below 0."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        return _Before(super().prepare(model, preparation), _fail)


class StraightFailing(Straight):
    """Fails, too, where a first input begins below 0."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        return _Before(super().prepare(model, preparation), _fail)


class Liar(ReferenceDevice):
    """Says that each output has one row more than it has."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        prepared = _Before(super().prepare(model, preparation), lambda _: None, more=1)
        prepared.is_static = False  # so that what it says is sent
        return prepared


class Slow(ReferenceDevice):
    """An execution takes as many seconds as the first element of its first input says, and less when that changes to 0.

    A relaxed model is prepared for three seconds.
    """

    slots = 64  # nothing of a processor's is used meanwhile

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Takes its time."""
        end = time.monotonic() + _PREPARATION
        while model.relaxed and time.monotonic() < end:
            time.sleep(1e-3)
            preparation.pace()
        return _Before(super().prepare(model, preparation), _wait)


class Unmarked(Slow):
    """As Slow, and once it has begun to execute, the kernel cannot mark the life words of its process any more."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As Slow does."""
        return _Before(super().prepare(model, preparation), _break_walk)


class Single(Slow):
    """The same, one execution at a time."""

    slots = 1


class Scarce(Slow):
    """The same on a thing that exists once: two executions at a time, of all accounts."""

    type = "ACCELERATOR"
    slots = 2


class Noting(Slow):
    """As Slow, and adds the second element of its first input to the file "ran" in BURST_RUNTIME_DIR when it begins."""

    needs = runtime_folder.needs()

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As Slow does."""
        return _Before(super().prepare(model, preparation), _note_run)


class Pondering(ReferenceDevice):
    """Binds for a fifth of a second, and looks every millisecond whether it should go on."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """As the reference device does."""
        return _Pondered(super().prepare(model, preparation), lambda _: None)


class Thorough(ReferenceDevice):
    """Prepares for half a second, and restores at once."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Takes its time."""
        time.sleep(_THOROUGHNESS)
        return super().prepare(model, preparation)

    def restore(self, model: Model, saved: object, root: object, preparation: Preparation) -> PreparedModel:
        """Takes none."""
        return super().prepare(model, preparation)


class Stepwise(ReferenceDevice):
    """Takes a step only when it may: before its model's own work as many as the first element of its input says, with a
    checkpoint after each.

    The file "steps" in BURST_RUNTIME_DIR is for the test: its first byte says how many steps may be taken (255: any
    number), its second how many were begun, and the others whose: the second element of the input.
    """

    needs = runtime_folder.needs()

    slots, quantum = 1, 1e-9
    nbytes = 256

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        return _Stepwise(super().prepare(model, preparation), _steps())


class Crashing(ReferenceDevice):
    """Dies of SIGSEGV in every execution, and in the preparation of a relaxed model."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares what is not relaxed."""
        if model.relaxed:
            _crash()
        return _Before(super().prepare(model, preparation), lambda _: _crash())


class Fragile(ReferenceDevice):
    """Dies of SIGSEGV over an input that begins with a NaN, and of SIGKILL over one that begins with minus infinity.

    Files in BURST_RUNTIME_DIR say more. "crash-…": each is removed and crashes the device once, over an input that
    begins with infinity, or in the preparation of a relaxed model. "hold": such a preparation waits while that is
    there, and says so by making "held". An execution takes as many milliseconds as its input begins below 0.
    """

    needs = runtime_folder.needs()

    slots = 64

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Crashes, or waits, when it is told to."""
        if model.relaxed:
            _crash_once()
            while Path(os.environ["BURST_RUNTIME_DIR"], "hold").exists():
                Path(os.environ["BURST_RUNTIME_DIR"], "held").touch()
                time.sleep(1e-3)
        return _Before(super().prepare(model, preparation), _break)


class Changing(ReferenceDevice):
    """Computes twice what it should where the file "changed" is in BURST_RUNTIME_DIR when a model is prepared."""

    needs = runtime_folder.needs()

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        prepared = super().prepare(model, preparation)
        return _Doubled(prepared) if Path(os.environ["BURST_RUNTIME_DIR"], "changed").exists() else prepared


class Staged(ReferenceDevice):
    """Makes a quick plan of a model, and a better one later.

    Files in BURST_RUNTIME_DIR say more. "hold": an improvement waits while that is there, and says so by making "held".
    "spoil": then it fails. Of each plan, "bound-…" says that requests are bound to it, and "restored-…" that it was
    restored.
    """

    needs = runtime_folder.needs()

    cache_files = CacheFiles(1, 0)

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """The quick one."""
        return _Quick(super().prepare(model, preparation), b"quick")

    def restore(self, model: Model, saved: Saved, root: object, preparation: Preparation) -> PreparedModel:
        """The one that was kept."""
        plan = bytes(saved.model[0][:_PLAN]).rstrip(b"-")
        _note("restored", plan)
        return _Plan(super().prepare(model, preparation), plan)


_PLAN = 16  # bytes of a plan's name


class _Plan(PreparedModel):
    """A prepared model that has a name, which is what is kept of it."""

    serves_all = True

    def __init__(self, prepared: PreparedModel, plan: bytes) -> None:
        self._prepared, self._plan = prepared, plan

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        _note("bound", self._plan)
        return self._prepared.bind(inputs, outputs, options)

    def saved(self, _: object) -> Saved:
        return Saved([self._plan.ljust(_PLAN, b"-") * 2**14])


class _Quick(_Plan):
    improves_after = 3

    def improved(self, _: object) -> PreparedModel:
        folder = Path(os.environ["BURST_RUNTIME_DIR"])
        while (folder / "hold").exists():
            (folder / "held").touch()
            time.sleep(1e-3)
        if (folder / "spoil").exists():
            raise RuntimeError("this improvement fails on purpose")
        return _Plan(self._prepared, b"better")


def _note(what: str, plan: bytes) -> None:
    Path(os.environ["BURST_RUNTIME_DIR"], f"{what}-{plan.decode()}").touch()


class Unkept(ReferenceDevice):
    """Cannot say what is to be kept of a model."""

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Prepares everything."""
        return _Unkept(super().prepare(model, preparation), lambda _: None)


class Ballast(Slow):
    """Holds 1.5 GB from its first model on, in pages of 4 KiB, which the kernel needs a tenth of a second to free."""

    nbytes = 3 * 2**29

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Takes the memory on board."""
        self._load = mmap.mmap(-1, self.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._load.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, self.nbytes, mmap.PAGESIZE):
            self._load[page] = 1
        return super().prepare(model, preparation)


def _crash() -> None:
    signal.raise_signal(signal.SIGSEGV)  # in this thread, which does not get any further


def _crash_once() -> None:
    for file in Path(os.environ["BURST_RUNTIME_DIR"]).glob("crash-*"):
        file.unlink()
        _crash()


def _break(inputs: Sequence[NDArray[Any] | None]) -> None:
    assert inputs[0] is not None
    first = float(inputs[0].flat[0])
    if math.isnan(first):
        _crash()
    elif first == math.inf:
        _crash_once()
    elif first == -math.inf:
        os.kill(os.getpid(), signal.SIGKILL)
    elif first < 0:
        time.sleep(-first * 1e-3)


def _fail(inputs: Sequence[NDArray[Any] | None]) -> None:
    first = inputs[0]
    if first is not None and float(first.flat[0]) < 0:
        raise ExecutionFailed(0, "odd", "it begins below 0")


def _wait(inputs: Sequence[NDArray[Any] | None]) -> None:
    first = inputs[0]
    assert first is not None
    begin = time.monotonic()
    while (left := min(float(first.flat[0]), _MOST) + begin - time.monotonic()) > 0:
        time.sleep(min(1e-3, left))


def _steps() -> mmap.mmap:
    with Path(os.environ["BURST_RUNTIME_DIR"], "steps").open("r+b") as file:
        return mmap.mmap(file.fileno(), Stepwise.nbytes)


class _Stepwise(PreparedModel):
    def __init__(self, prepared: PreparedModel, steps: mmap.mmap) -> None:
        self._prepared, self._steps, self.is_static = prepared, steps, prepared.is_static

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        return _BoundSteps(self._prepared.bind(inputs, outputs, options), inputs[0], self._steps)


class _BoundSteps(BoundExecution):
    def __init__(self, bound: BoundExecution, source: Any, steps: mmap.mmap) -> None:
        self._bound, self._source, self._steps = bound, source.reshape(-1), steps
        self.shapes = bound.shapes

    def run(self) -> None:
        count, name = map(int, self._source[:2])
        for _ in range(count):
            self._step(name)
            checkpoint()
        try:
            self._bound.run()
        finally:
            self.shapes = self._bound.shapes

    def _step(self, name: int) -> None:
        """One execution is in here at a time: there is one slot."""
        steps = self._steps
        while steps[0] != 255 and steps[1] >= steps[0]:
            time.sleep(1e-4)
        steps[2 + steps[1]] = name
        steps[1] += 1


def _note_run(inputs: Sequence[NDArray[Any] | None]) -> None:
    assert inputs[0] is not None
    with Path(os.environ["BURST_RUNTIME_DIR"], "ran").open("a") as file:
        file.write(f"{inputs[0].flat[1]:g}\n")


def _break_walk(_: object) -> None:
    """Puts a word first into the list that the kernel walks at this process's death, on a page that is not there."""
    page = os.memfd_create("broken")
    os.ftruncate(page, mmap.PAGESIZE)
    assert lib.fmq_life_hold(page, 0, 1) >= 0
    os.ftruncate(page, 0)
    os.close(page)


class _Before(PreparedModel):
    """A prepared model that does something before each execution, and says that outputs have so many rows more."""

    def __init__(
        self, prepared: PreparedModel, before: Callable[[Sequence[NDArray[Any] | None]], None], more: int = 0
    ) -> None:
        self._prepared, self._before, self._more = prepared, before, more
        self.is_static = prepared.is_static

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        return _BoundBefore(self._prepared.bind(inputs, outputs, options), lambda: self._before(inputs), self._more)


class _Doubled(PreparedModel):
    def __init__(self, prepared: PreparedModel) -> None:
        self._prepared = prepared

    def bind(
        self, inputs: Sequence[NDArray[Any] | None], outputs: Sequence[NDArray[Any]], options: BindOptions
    ) -> BoundExecution:
        return _BoundDoubled(self._prepared.bind(inputs, outputs, options), outputs[0])


class _BoundDoubled(BoundExecution):
    def __init__(self, bound: BoundExecution, output: NDArray[Any]) -> None:
        self._bound, self._output, self.shapes = bound, output, bound.shapes

    def run(self) -> None:
        self._bound.run()
        self._output *= 2


class _Pondered(_Before):
    def bind(self, inputs: Any, outputs: Any, options: BindOptions) -> BoundExecution:
        for _ in range(200):
            time.sleep(1e-3)
            options.pace()
        return super().bind(inputs, outputs, options)


class _Unkept(_Before):
    def saved(self, _: object) -> Saved:
        raise RuntimeError("this fails on purpose")


class _BoundBefore(BoundExecution):
    def __init__(self, bound: BoundExecution, before: Callable[[], None], more: int) -> None:
        self._bound, self._before, self._more = bound, before, more
        self.shapes = self._shapes()

    def run(self) -> None:
        self._before()
        try:
            self._bound.run()
        finally:
            self.shapes = self._shapes()

    def _shapes(self) -> Sequence[tuple[tuple[int, ...], bool]]:
        shapes = self._bound.shapes
        return [((d[0] + self._more, *d[1:]), enough) for d, enough in shapes] if self._more else shapes
