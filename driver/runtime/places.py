"""Where the data of a model in several steps lies: one memory for inputs and what goes between steps, one for outputs.

What one step writes, the next one reads where it is. So a step's request names the same two pools as every other, and
differs in what it takes from them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import GeneralFailure, Request
from driver.client.buffers import Buffers
from driver.client.names import named
from driver.client.workspace import InputSet, OutputSet
from driver.nn import Model, Subgraph, combine_dimensions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from burst import Memory, OutputShape, RequestArgument
    from driver.client.buffers import EncodedRequest
    from driver.client.layout import Shapes
    from driver.nn import Operand
    from driver.runtime.partition import Step


def between(model: Model, steps: Sequence[Step]) -> tuple[int, ...]:
    """Return the operands that steps hand to each other, without the model's own outputs."""
    return tuple(sorted({i for step in steps for i in step.outputs}.difference(model.main.outputs)))


def with_temporaries(model: Model, temporaries: Sequence[int]) -> Model:
    """Return a record that lays `temporaries` out behind the inputs, where a `Buffers` or `InputSet` is made of it."""
    graph = model.main
    return Model(Subgraph(graph.operands, (), (*graph.inputs, *temporaries), graph.outputs))


def arguments(step: Step, where: Mapping[int, RequestArgument]) -> tuple[Any, Any]:
    """Return the (inputs, outputs) of a step's request. `where`: of each operand that enters or leaves a step."""
    return tuple(where[i] for i in step.inputs), tuple(where[i] for i in step.outputs)


def check_shapes(operands: Sequence[Operand], shapes: Sequence[OutputShape]) -> None:
    """Raise GeneralFailure where a device says other shapes of outputs than the model."""
    for n, (operand, shape) in enumerate(zip(operands, shapes, strict=False)):
        if combine_dimensions(operand.dimensions, shape.dimensions) is None:
            raise GeneralFailure(
                f"the device reports shape {shape.dimensions} for output {n}; the model says {operand.dimensions}"
            )


class StepInputs(InputSet):
    """The inputs of a step, in memory that others own."""

    _optional = 0  # only a file has inputs that may be left out, and it is not divided

    def __init__(
        self,
        memory: Memory,
        its: tuple[RequestArgument, ...],
        arrays: tuple[NDArray[Any] | None, ...] = (),
        names: tuple[str, ...] = (),
    ) -> None:
        self.memory, self.arguments, self.arrays, self.names = memory, its, arrays, names


class StepOutputs(OutputSet):
    """The outputs of a step, in memory that others own. It has as much room as the model says."""

    named = named(())  #: the chain gives its own outputs their names
    _has_packed = False  # a model with texts is not divided

    def __init__(self, operands: Sequence[Operand], memory: Memory, its: tuple[RequestArgument, ...]) -> None:
        self._operands, self.memory, self.arguments = list(operands), memory, its
        self.sizes = tuple(argument.length for argument in its)
        self.begin()

    def arrays(self, shapes: Sequence[OutputShape]) -> tuple[NDArray[Any], ...]:
        """Return no arrays: the chain has them. Raise GeneralFailure for shapes that contradict the model."""
        if self.shapes is not shapes:
            check_shapes(self._operands, shapes)
            self.shapes = shapes
        return ()


class StepBuffers:
    """The buffers of a step's burst: those of the frame that the chain aims it at. The chain knows which are free."""

    def __init__(self) -> None:
        self.inputs: InputSet  #: as `Buffers` has them
        self.lent: InputSet | None = None
        self._target: StepOutputs
        self._known: list[StepOutputs] = []

    def aim(self, inputs: StepInputs, outputs: StepOutputs) -> None:
        """Make the next request use these."""
        self.inputs, self._target = inputs, outputs

    def know(self, outputs: StepOutputs) -> None:
        """Remember outputs that the chain will aim at, too."""
        self._known.append(outputs)

    def fill(self, arrays: Sequence[Any]) -> int:
        """Copy arrays into the inputs. Only the chain's first step has any; the chain fills those itself."""
        return self.inputs.fill(arrays)

    def free_outputs(self) -> OutputSet:
        return self._target

    def outputs_for(self, inputs: InputSet) -> OutputSet:
        del inputs
        return self._target

    def next_inputs(self) -> None:
        """Do nothing: the chain aims before the next request."""

    def give_back(self, inputs: InputSet) -> None:
        """Do nothing: the chain gives them to another frame when all steps are done with them."""

    def requests(self) -> list[EncodedRequest]:
        return [encoded for outputs in list(self._known) for encoded in list(outputs.encoded.values())]

    def forget_requests(self) -> None:
        for outputs in self._known:
            outputs.encoded.clear()

    def grow(self, outputs: OutputSet, shapes: tuple[OutputShape, ...]) -> None:
        """Do nothing: there is as much room as the model says, and a device that wants more is wrong."""

    def close(self) -> None:
        """Forget the encoded requests: another burst may serve these buffers afterwards."""
        self.forget_requests()

    __del__ = close  # output sets and requests refer to each other


class ChainFrame:
    """One execution's memory, and what every step reads and writes in it."""

    def __init__(
        self, model: Model, temporaries: Sequence[int], steps: Sequence[Step], inputs: InputSet, outputs: OutputSet
    ) -> None:
        """Take `inputs` and `outputs` that are laid out for `with_temporaries(model, temporaries)`."""
        graph, n = model.main, len(model.main.inputs)
        where = dict(zip((*graph.inputs, *temporaries), inputs.arguments, strict=True))
        where |= zip(graph.outputs, outputs.arguments, strict=True)
        self.inputs, self.outputs = inputs, outputs
        self.whole = Request(inputs.arguments[:n], outputs.arguments, (inputs.memory, outputs.memory))
        self.steps: list[tuple[StepInputs, StepOutputs]] = []
        for step in steps:
            reads, writes = arguments(step, where)
            operands = [graph.operands[i] for i in step.outputs]
            self.steps.append((StepInputs(inputs.memory, reads), StepOutputs(operands, outputs.memory, writes)))

    @property
    def is_in_use(self) -> bool:
        """True if a device still executes a request of this frame whose result was given up."""
        return any(outputs.is_busy for _, outputs in self.steps)


class ChainMemory:
    """The frames of one chain. The caller holds the chain's lock."""

    def __init__(
        self,
        model: Model,
        temporaries: Sequence[int],
        steps: Sequence[Step],
        step_buffers: Sequence[StepBuffers],
        shapes: Shapes,
        depth: int,
    ) -> None:
        """Lay the first frame out. `shapes`: of the model's inputs."""
        self._model, self._temporaries, self._steps, self._step_buffers = model, temporaries, steps, step_buffers
        self._named = named(tuple(tensor.name for tensor in model.inputs))
        laid_out = with_temporaries(model, temporaries)
        between = tuple(model.main.operands[i].dimensions for i in temporaries)
        self._buffers = Buffers(laid_out, (*shapes, *between), depth)
        self._frames: dict[tuple[InputSet, OutputSet], ChainFrame] = {}
        self._late: list[ChainFrame] = []  # given up, and a device may still be writing to them
        self.copied = 0  #: bytes, by `frame`

    @property
    def inputs(self) -> tuple[NDArray[Any] | None, ...]:
        """The arrays of the next frame."""
        return self._named(self._buffers.inputs.arrays[: len(self._model.main.inputs)])

    def frame(self, arrays: tuple[Any, ...]) -> ChainFrame:
        """Return the next frame, with those arrays copied into its inputs. Raise ValueError, ResultsHeld."""
        inputs = self._buffers.inputs
        if arrays:
            self.copied += StepInputs(inputs.memory, (), self.inputs, self._named.names).fill(arrays)
        for late in [late for late in self._late if not late.is_in_use]:
            late.outputs.is_busy = False
            self._late.remove(late)
        outputs = self._buffers.free_outputs()
        frame = self._frames.get((inputs, outputs))
        if frame is None:
            frame = ChainFrame(self._model, self._temporaries, self._steps, inputs, outputs=outputs)
            self._frames[inputs, outputs] = frame
            for buffers, (_, writes) in zip(self._step_buffers, frame.steps, strict=True):
                buffers.know(writes)
        return frame

    def lend(self, frame: ChainFrame) -> None:
        """Leave its memory to the frame until `take_back`; `inputs` are the next frame's."""
        self._buffers.next_inputs()
        frame.outputs.is_busy = True

    def take_back(self, frame: ChainFrame) -> None:
        """Take its memory back: the frame has been through all steps, or was given up."""
        self._buffers.give_back(frame.inputs)
        frame.outputs.is_busy = False
        if frame.is_in_use:
            self.put_aside(frame)

    def put_aside(self, frame: ChainFrame) -> None:
        """Keep its outputs from other frames until no step writes to them; its inputs serve the next one.

        A step that is late for this frame comes before the same step of the next one, in the same burst.
        """
        frame.outputs.is_busy = True
        self._late.append(frame)

    def close(self) -> None:
        self._frames.clear()
        self._late.clear()
        self._buffers.close()
