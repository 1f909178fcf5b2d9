"""A device whose driver is a shared library (burst_device.h)."""

from __future__ import annotations

import os
import stat
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from burst import GeneralFailure
from burst.wire import VERSIONS
from driver.config import home
from driver.deadlines import taking
from driver.devices.library.description import LibraryDescription, build_of, describe
from driver.devices.library.driver_buffers import allocated, mapped
from driver.devices.library.execution import LibraryExecution
from driver.devices.library.flat_model import FlatModel
from driver.devices.library.loaded import Callback, LoadedDriver
from driver.devices.library.own_burst import configured
from driver.devices.library.table import ffi
from driver.errors import DeviceNotFound
from driver.interface import (
    BoundExecution,
    CacheFiles,
    Capabilities,
    Device,
    DeviceStatus,
    DriverBuffer,
    Needs,
    Performance,
    PreparedModel,
    Saved,
)
from driver.nn import Extension, OperandType
from fmq.clock import FOREVER
from fmq.printable import printable_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from burst import BurstOffer, ExecutionBurst
    from driver.interface import BindOptions, BufferArgument, BufferRequest, MemoryHandle, Preparation
    from driver.nn import Model
    from driver.options import Preference

_PREFERENCES = {"low_power": 0, "fast_single_answer": 1, "sustained_speed": 2}
_MOST_REASON = 1000  # bytes
_TYPE_NAMES = {int(kind): kind.name for kind in OperandType}
_FIGURES = {-1: "relaxed_scalar", -2: "relaxed_tensor", -3: "if_performance", -4: "while_performance"}


class LibraryDevice(Device):
    """Calls the functions of the library's table. `library_class` makes a subclass for each library."""

    path: ClassVar[str]
    description: ClassVar[LibraryDescription]
    asked_apart = True
    status = DeviceStatus("unknown")  #: until the library is loaded

    def __init__(self) -> None:
        self._loading, self._preparing = threading.Lock(), threading.Lock()
        self._build = build_of(self.path)
        self._loaded: LoadedDriver | None = None

    def is_outdated(self) -> bool:
        try:
            return build_of(self.path) != self._build
        except DeviceNotFound:
            return False  # there is nothing better

    @property
    def driver(self) -> LoadedDriver:
        """The library in this process, which is loaded, and its device opened, when it is first needed.

        Raises StatusError.
        """
        with self._loading:
            if self._loaded is None:
                loaded = LoadedDriver(self.path, self.report, self.watched)
                if (loaded.name, loaded.version) != (self.name, self.version):
                    raise GeneralFailure(
                        f"driver {self.path!r} was {self.name} {self.version} when the device started, and is "
                        f"{loaded.name} {loaded.version} now: start the device again"
                    )
                if self.status.state == "unknown" and not self.status.reason:
                    self.report("available")
                self._loaded = loaded
            return self._loaded

    def supported_operations(self, model: Model) -> list[bool]:
        return [reason is None for reason in self.explain(model)]

    def explain(self, model: Model) -> Sequence[str | None]:
        driver, count = self.driver, len(model.main.operations)
        reasons: list[str | None] = [None] * count

        def refuse(index: int, reason: Any) -> None:
            if index >= count:
                raise GeneralFailure(
                    f"driver {driver.name!r}: supported refused operation {index} of {count}; they count from 0"
                )
            text = printable_line(ffi.string(reason, _MOST_REASON)) if reason != ffi.NULL else ""
            reasons[index] = text or f"the device {self.name} does not support it"

        callback = Callback("void(void *, uint32_t, const char *)", refuse)
        answers = ffi.new("burst_answers *", (ffi.sizeof("burst_answers"), count, ffi.NULL, callback.pointer))
        flat = FlatModel(model)  # lives until the call has returned
        driver.call("supported", driver.device, flat.pointer, answers)
        callback.check()
        return reasons

    @property
    def capabilities(self) -> Capabilities | None:
        if "capabilities" not in self.description.functions:
            return None
        driver, operands = self.driver, dict[str, Performance]()
        others: dict[str, Any] = {}

        def put(code: int, exec_time: float, power: float) -> None:
            figure = Performance(exec_time, power if power >= 0 else None)
            if code in _FIGURES:
                others[_FIGURES[code]] = figure
            elif code in _TYPE_NAMES:
                operands[_TYPE_NAMES[code]] = figure
            else:
                raise GeneralFailure(f"driver {driver.name!r}: capabilities put {code}, which is no operand type")

        callback = Callback("void(void *, int32_t, float, float)", put)
        capabilities = ffi.new("burst_capabilities *", (ffi.sizeof("burst_capabilities"), ffi.NULL, callback.pointer))
        driver.call("capabilities", driver.device, capabilities)
        callback.check()
        return Capabilities(operands, **others)

    def rest(self) -> None:
        loaded = self._loaded
        if loaded and loaded.has("rest"):
            loaded.tell("rest", loaded.device)

    def allocate(self, request: BufferRequest) -> DriverBuffer | None:
        if "allocate" not in self.description.functions:
            return None
        models = [use.prepared for use in request.roles]
        own = next((model for model in models if isinstance(model, LibraryModel)), None)
        prefixes = dict(own.model.extensions) if own else {}
        return allocated(self.driver, request, prefixes, _prepared_of)

    def map_memory(self, handle: MemoryHandle) -> DriverBuffer:
        return mapped(self.driver, handle)

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        return self._prepare(model, FlatPreparation(preparation))

    def restore(self, model: Model, saved: Saved, root: NDArray[np.uint8], preparation: Preparation) -> PreparedModel:
        return self._prepare(model, FlatPreparation(preparation, (*saved.model, *saved.data)))

    def _prepare(self, model: Model, preparation: FlatPreparation) -> PreparedModel:
        driver, flat = self.driver, FlatModel(model)
        try:
            with nullcontext() if driver.table.prepares_at_once else taking(self._preparing):
                prepared = driver.made("prepare", "burst_prepared *", driver.device, flat.pointer, preparation.pointer)
            made = LibraryModel(driver, model, flat, prepared, shared=bool(driver.table.is_shareable))
        finally:
            preparation.check()  # if it raises, `made` is released
        return made


class FlatPreparation:
    """A `burst_preparation`."""

    def __init__(self, preparation: Preparation, parts: Sequence[Any] = ()) -> None:
        def go_on() -> int:
            preparation.pace()
            return 0

        self._pace = Callback("int32_t(void *)", go_on)
        self._parts = [np.frombuffer(part, np.uint8) for part in parts]
        places = [ffi.cast("void *", part.ctypes.data) for part in self._parts]
        self._places = ffi.new("void *[]", [*places, ffi.NULL])
        self._sizes = ffi.new("uint64_t[]", [*(part.nbytes for part in self._parts), 0])
        self.pointer = ffi.new("burst_preparation *", {"size": ffi.sizeof("burst_preparation")})
        self.pointer.preference = _PREFERENCES[preparation.preference]
        self.pointer.deadline = FOREVER if preparation.deadline is None else preparation.deadline
        self.pointer.pace = self._pace.pointer
        self.pointer.n_parts, self.pointer.parts, self.pointer.part_bytes = len(parts), self._places, self._sizes

    def check(self) -> None:
        """Raise what `pace` has raised: the driver gave up for that."""
        self._pace.check()


class LibraryModel(PreparedModel):
    """A model that the driver's `prepare` made."""

    def __init__(self, driver: LoadedDriver, model: Model, flat: FlatModel, prepared: Any, *, shared: bool) -> None:
        self.driver, self.model, self.prepared, self._flat = driver, model, prepared, flat
        driver.models[int(ffi.cast("uintptr_t", prepared))] = self
        self.serves_all = shared
        self.burst_versions = [v for v in VERSIONS if v <= (driver.table.burst_version or max(VERSIONS))]
        if driver.has("improve"):
            with driver.watched("improves_after"):
                self.improves_after = driver.table.improves_after(prepared)

    def bind(
        self,
        inputs: Sequence[NDArray[Any] | BufferArgument | None],
        outputs: Sequence[NDArray[Any] | BufferArgument],
        options: BindOptions,
    ) -> BoundExecution:
        return LibraryExecution(self, inputs, outputs, options)

    def saved(self, root: NDArray[np.uint8]) -> Saved | None:
        driver, parts = self.driver, ([], [])  # type: tuple[LoadedDriver, tuple[list[bytes], list[bytes]]]
        if not driver.has("save"):
            return Saved()

        def put(is_code: int, data: Any, nbytes: int) -> None:
            parts[not is_code].append(bytes(ffi.buffer(data, nbytes)))

        callback = Callback("void(void *, int32_t, const void *, uint64_t)", put)
        saving = ffi.new("burst_saving *", (ffi.sizeof("burst_saving"), ffi.NULL, callback.pointer))
        driver.call("save", self.prepared, saving)
        callback.check()
        if not any(parts):
            return None
        wanted, found = (driver.table.n_code_files, driver.table.n_data_files), tuple(map(len, parts))
        if wanted != found:
            raise GeneralFailure(
                f"driver {driver.name!r}: save put {found[0]} parts of code and {found[1]} of data; its table says "
                f"{wanted[0]} and {wanted[1]}"
            )
        return Saved(*parts)

    def configure_execution_burst(self, offer: BurstOffer) -> ExecutionBurst | None:
        return configured(self, offer) if self.driver.has("configure_burst") else None

    def rest(self) -> None:
        if self.driver.has("rest_model"):
            self.driver.tell("rest_model", self.prepared)

    def burst_began(self, preference: Preference) -> None:
        if self.driver.has("burst_began"):
            self.driver.tell("burst_began", self.prepared, _PREFERENCES[preference])

    def burst_ended(self) -> None:
        if self.driver.has("burst_ended"):
            self.driver.tell("burst_ended", self.prepared)

    def improved(self, preparation: Preparation) -> PreparedModel | None:
        driver, flat, place = self.driver, FlatPreparation(preparation), ffi.new("burst_prepared **")
        better = None
        try:
            driver.call("improve", self.prepared, flat.pointer, place)
            if place[0] != ffi.NULL:
                better = LibraryModel(driver, self.model, self._flat, place[0], shared=self.serves_all)
        finally:
            flat.check()  # if it raises, `better` is released
        return better

    def __del__(self) -> None:
        self.driver.tell("release", self.prepared)


def _prepared_of(model: PreparedModel) -> Any:
    if not isinstance(model, LibraryModel):
        raise GeneralFailure(f"{type(model).__name__} is no model of this driver")
    return model.prepared


def library_class(path: str) -> type[LibraryDevice]:
    """Return the device class of the library at this absolute path. Raise DeviceNotFound."""
    return _class_of(path, describe(path))


def _files_of(path: str) -> tuple[str, ...]:
    """Return the library, and the folder of libraries that it may load, unless that has more than one program's
    files.
    """
    folder = Path(path).parent
    is_common = folder.stat().st_mode & stat.S_ISVTX or home().is_relative_to(folder)
    return (path,) if is_common else (path, str(folder))


_class_by_description: dict[tuple[str, int], type[LibraryDevice]] = {}


def _class_of(path: str, said: LibraryDescription) -> type[LibraryDevice]:
    found = _class_by_description.get((path, id(said)))
    if found is None:
        fields = {
            "__doc__": f"The driver in {path}.",
            "path": path,
            "own_files": _files_of(path),
            "description": said,
            "name": said.name,
            "version": said.version,
            "type": said.type,
            "slots": said.slots or os.cpu_count() or 1,
            "quantum": said.quantum_ns / 1e9 or Device.quantum,
            "cache_files": said.cache_files and CacheFiles(*said.cache_files),
            "extensions": tuple(map(Extension, said.extensions)),
            "own_memory_kinds": frozenset(said.memory_kinds),
            "needs": _needs(said),
        }
        found = _class_by_description[path, id(said)] = type("LibraryDevice", (LibraryDevice,), fields)
    return found


def _needs(said: LibraryDescription) -> Needs:
    read, write, calls = (tuple(said.needs.get(name, ())) for name in ("read_paths", "write_paths", "system_calls"))
    return Needs(read, write, calls)
