"""The runs of one interpreter: in a device, and in this process where the device cannot.

An interpreter in this process, which has applied no delegate, holds the memory of inputs and outputs. A run takes the
inputs and the state from there, and puts what comes back where the interpreter would have put it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burst import GeneralFailure, InvalidArgument, Memory, PeerDied, StatusError
from driver.devices.litert.entry_file import EntryFile
from driver.devices.litert.interpreted import SETTING
from driver.dropin.device_model import DeviceModel, has_killed
from driver.dropin.hook import DEVICE
from driver.dropin.not_on_device import NotOnDevice
from driver.dropin.report import tally
from driver.nn import Operand, validate
from driver.nn.file_form import ModelFile, model_of_file, tensor_type

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from driver.nn import Model

    Arrays = list[NDArray[Any]]
    Shape = tuple[int, ...]

_DOCTOR = "burst doctor tells what is wrong with the device"
_MOST_SHAPES = 8
"""The most sets of input shapes for which a model stays prepared."""


BETWEEN = "the program reads tensors in between"


def name_of(source: object) -> str:
    """Return the name under which the model of a path or of bytes is counted."""
    if isinstance(source, str | os.PathLike):
        return os.fsdecode(os.path.basename(os.fspath(source))) or "?"
    return f"a model of {len(source)} bytes" if isinstance(source, bytes) else "?"


class LiteRuns:
    """The runs of one interpreter, of all its subgraphs, and its named variables. One thread at a time."""

    def __init__(self, source: str | bytes, options: Mapping[str, Any], make: Callable[[bytes], Any]) -> None:
        """`source`: the path of the file, or its bytes. `options`: as the device litert takes them. `make`: returns a
        real interpreter of a file, with the program's options.
        """
        self.name, self.make = name_of(source), make
        self._source, self._options = source, options
        self._entries: dict[int, EntryRuns] = {}
        self._state: dict[tuple[str, str], NDArray[Any]] = {}

    def check(self, real: Any) -> None:
        """Read the file, and find its entries. `real`: the wrapper of the interpreter in this process.

        Raise NotOnDevice where the device cannot run one of them.
        """
        numbers = {0} | {real.GetSubgraphIndexFromSignature(key) for key in real.GetSignatureDefs()}
        try:
            self._file = data = Memory.frozen(self._source).asarray()
            for number in sorted(numbers):
                entry = EntryFile(data, number)
                for index in (*entry.inputs, *entry.outputs, *entry.cells):
                    tensor_type(np.dtype(real.TensorType(index, number)).name, None)
                self._entries[number] = EntryRuns(self, entry, number)
            self._state = self._initial([each.file for each in self._entries.values()])
        except NotOnDevice:
            raise
        except Exception as error:  # whatever it is, the program runs
            raise NotOnDevice(f"the file cannot be sent to a device: {error}") from error

    def _initial(self, files: Sequence[EntryFile]) -> dict[tuple[str, str], NDArray[Any]]:
        if not files[0].variables:
            return {}
        file = next((each for each in files if each.calls_once), files[0])
        try:
            values = _ran(self.make(file.initial().tobytes()), [])
        except (RuntimeError, ValueError) as error:
            raise NotOnDevice(f"a variable has no value before the first run: {error}") from error
        return {variable.name: value for variable, value in zip(file.variables, values, strict=True)}

    def asked(self) -> Any:
        """Return a real interpreter as the program asked for it, of the file as it was then."""
        return self.make(self._file.tobytes())

    def is_between(self, index: int, number: int) -> bool:
        """Return True for a tensor that a run makes on its way: only a run in this process leaves it behind."""
        found = self._entries.get(number)
        return found is not None and index in found.between

    def forget_memory(self) -> None:
        """Forget where tensors lie, before they may move."""
        for runs in self._entries.values():
            runs.memory = None

    def ran_here(self, real: Any) -> Any:
        """Return a real interpreter as the program asked for it, after a run on what the inputs are now.

        Raise NotOnDevice for one whose state cannot be put there.
        """
        entry = self._entries[0].file
        if entry.has_state:
            raise NotOnDevice("tensors in between cannot be read of a file with variables")
        tally.refuse(self.name, BETWEEN)
        own = self.asked()
        _ran(own, [_value(real, index, 0) for index in entry.inputs])
        return own

    def run(self, real: Any, number: int) -> dict[tuple[int, int], NDArray[Any]]:
        """Run a subgraph on the tensors of the interpreter in this process; return outputs for which it has no room, by
        subgraph and tensor. Raise RuntimeError.
        """
        runs = self._entries[number]
        memory = runs.memory or runs.found(real)
        variables = runs.file.variables
        found = runs.run(real, [*memory.given, *[self._state[each.name] for each in variables]])
        grown = {}
        for index, room, value in zip(memory.places, memory.taken, found, strict=False):
            if room is not None and room.shape == value.shape:
                np.copyto(room, value)
            elif index in runs.written:
                grown[number, index] = value
        for variable, value in zip(variables, found[len(memory.places) :], strict=True):
            self._state[variable.name] = value
        return grown

    def model(self, file: EntryFile, inputs: Sequence[Any], outputs: Sequence[Any]) -> Model:
        """Return the model of an entry. `inputs`, `outputs`: type and shape of each; None: only a run knows it."""
        given, taken = ([_operand(*each) for each in side] for side in (inputs, outputs))
        found = model_of_file(ModelFile("tflite", file.data, {}, {SETTING: self._options}), given, taken)
        found = replace(found, name=self.name)
        validate(found)
        return found


class TensorMemory(NamedTuple):
    """Views of an interpreter's memory. places: the tensors that come back; taken: None for one without room."""

    given: Sequence[NDArray[Any]]
    places: Sequence[int]
    taken: Sequence[NDArray[Any] | None]


class EntryRuns:
    """The runs of one subgraph. written: tensors that a run brings back; between: those that it does not."""

    def __init__(self, runs: LiteRuns, file: EntryFile, number: int) -> None:
        self.file, self._runs, self._number = file, runs, number
        self.written, self.between = file.made.union(file.cells), file.made.difference(file.outputs)
        self.memory: TensorMemory | None = None
        self._models: dict[tuple[Shape, ...], DeviceModel | NotOnDevice] = {}
        self._own: Any = None
        self._is_gone = False

    def found(self, real: Any) -> TensorMemory:
        """Look up where tensors lie, until `LiteRuns.forget_memory`."""
        file, number = self.file, self._number
        given = [_value(real, index, number) for index in (*file.inputs, *file.cells)]
        places = [*file.outputs, *file.cells]
        taken = [_room(real, index, number) if index in self.written else None for index in places]
        self.memory = TensorMemory(given, places, taken)
        return self.memory

    def run(self, real: Any, arrays: Arrays) -> Arrays:
        """Run once: in the device, or else in this process. Return the caller's arrays. Raise RuntimeError."""
        name = self._runs.name
        if not self._is_gone:
            try:
                found = self._on_device(real, arrays).run(arrays)
            except NotOnDevice as error:
                tally.refuse(name, str(error), error.remedy)
            except Exception as error:  # whatever it is, the program runs
                if has_killed(error) or isinstance(error, PeerDied):
                    raise RuntimeError(f"{name}: the model ended its device: {error}") from error
                if isinstance(error, StatusError | ValueError):  # the real one says so in its own words
                    tally.refuse(name, f"a run failed in the device: {error}")
                else:
                    tally.refuse(name, f"the device did not take it: {error}", _DOCTOR)
                    tally.warn(f"{name} runs in this process from now on: {error}")
                    self._is_gone = True
            else:
                tally.count(name, "device_runs")
                return [*found]
        tally.count(name, "process_runs")
        if self._own is None:
            self._own = self._runs.make(self.file.data.tobytes())
        return _ran(self._own, arrays)

    def _on_device(self, real: Any, arrays: Arrays) -> DeviceModel:
        shapes = tuple(array.shape for array in arrays)
        found = self._models.get(shapes)
        if found is None:
            if len(self._models) >= _MOST_SHAPES:
                self._models.pop(next(iter(self._models)))
            found = self._models[shapes] = self._made(real, arrays)
        if isinstance(found, NotOnDevice):
            raise found
        return found

    def _made(self, real: Any, arrays: Arrays) -> DeviceModel | NotOnDevice:
        """Return the model, prepared; or why it cannot be, where a second try would end as the first."""
        kept = arrays[len(self.file.inputs) :]
        given = [(array.dtype, array.shape) for array in arrays]
        outputs = [
            (np.dtype(real.TensorType(index, self._number)), None if room is None else room.shape)
            for index in self.file.outputs
            for room in [_room(real, index, self._number)]
        ]
        model = self._runs.model(self.file, given, [*outputs, *((array.dtype, array.shape) for array in kept)])
        made = DeviceModel(model, os.environ.get(DEVICE) or "litert")
        try:
            made.prepare()
        except (GeneralFailure, InvalidArgument) as error:
            if has_killed(error) or isinstance(error, PeerDied):
                raise
            return NotOnDevice(f"the device did not prepare it: {error}", _DOCTOR)
        return made


def _operand(dtype: np.dtype[Any], shape: Shape | None) -> Operand:
    rank = None if shape is None else len(shape)
    return Operand(tensor_type(dtype.name, rank), shape or ())


def _value(real: Any, index: int, number: int) -> NDArray[Any]:
    """Return a view of a tensor. An empty one has no memory."""
    try:
        found: NDArray[Any] = real.tensor(real, index, number)
    except ValueError:
        found = np.empty(real.TensorSize(index, number), real.TensorType(index, number))
        if found.size:
            raise
    return found


def _room(real: Any, index: int, number: int) -> NDArray[Any] | None:
    """Return a view of an output; None where only a run knows its size."""
    try:
        return _value(real, index, number)
    except ValueError:
        return None


def _ran(interpreter: Any, arrays: Arrays) -> Arrays:
    """Run a real interpreter once. Raise RuntimeError, ValueError."""
    told = interpreter.get_input_details()
    if any(tuple(each["shape"]) != array.shape for each, array in zip(told, arrays, strict=True)):
        for each, array in zip(told, arrays, strict=True):
            interpreter.resize_tensor_input(each["index"], array.shape)
    interpreter.allocate_tensors()
    for each, array in zip(told, arrays, strict=True):
        interpreter.set_tensor(each["index"], array)
    interpreter.invoke()
    return [_value(interpreter._interpreter, each["index"], 0).copy() for each in interpreter.get_output_details()]
