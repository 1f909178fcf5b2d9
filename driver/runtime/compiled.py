"""The model that `driver.compile` returns: on one or several devices, with the CPU behind them."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from driver.client.surface import AnyPreparedModel, signature
from driver.options import Batch
from driver.runtime.allocate import StepRole, allocate
from driver.runtime.control_flow import inner_steps
from driver.runtime.fallback import CLOSED, CpuFallback, FallbackExecutor, Fallbacks
from driver.runtime.local import NAME
from driver.runtime.open_steps import OpenSteps, is_single, together
from driver.runtime.plan import PreparedStep, StepsExecutor
from driver.runtime.shared_buffers import SharedBuffersExecutor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from driver.client.device import RemoteDevice
    from driver.client.device_buffers import Buffer, BufferDesc, BufferRole
    from driver.client.executor import Executor
    from driver.interface import Source
    from driver.nn import Model
    from driver.options import InputShapes, PrepareOptions
    from driver.replicas import Serving
    from driver.runtime.measuring import Figures

_numbers = count(1)
_WINDOW = 0.002  # seconds


class Placement(list[tuple[str, tuple[int, ...]]]):
    """The steps of a compiled model, as a list, and the figures by which it was chosen.

    figures: seconds of plans, measured on the model itself. capabilities: of each device that was asked for them,
    whether its driver has "stated" them or they were "measured"; they proposed the plans, and decided alone where
    `figures` has no seconds.
    """

    def __init__(
        self, steps: Sequence[tuple[str, tuple[int, ...]]], figures: Figures, capabilities: Mapping[str, Source]
    ) -> None:
        super().__init__(steps)
        self.figures, self.capabilities = figures, dict(capabilities)

    def __str__(self) -> str:
        where = " + ".join(f"{device} ({len(own)} operation{'s' * (len(own) != 1)})" for device, own in self)
        busy = ", on a busy machine" if self.figures.was_busy else ""
        compared = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in sorted(self.figures.seconds.items()))
        if compared:
            return f"{where}; measured{busy}: {compared}"
        known = ", ".join(f"{name} {source}" for name, source in sorted(self.capabilities.items()))
        return f"{where}; by capabilities: {known}" if known else where


def _place(step: PreparedStep) -> str:
    """Return where a step is executed now."""
    return NAME if step.model.is_replaced else step.device


class CompiledModel(AnyPreparedModel):
    """A model on one or several devices. Any thread may use it, several at once. Made by `compile`.

    On one device it is what that device's `prepare` gives, and its burst is that device's burst.
    """

    def __init__(
        self,
        model: Model,
        options: PrepareOptions,
        steps: Sequence[PreparedStep],
        devices: Sequence[RemoteDevice],
        fallbacks: Fallbacks,
        figures: Figures,
        recipe: tuple[Any, ...],
        *,
        may_fall_back: bool,
        capabilities: Mapping[str, Source],
    ) -> None:
        """Use `compile`. `devices`: connections to be closed with it. `figures`: of the plans that were compared.
        `recipe`: how to compile it again, for pickle. `capabilities`: as of `Placement`.
        """
        self._figures, self._recipe, self._capabilities = figures, recipe, capabilities
        self.priority, self._batch = options.priority, options.batch
        self._steps, self._devices, self._fallbacks = steps, devices, fallbacks
        self._is_closed = False
        self._number = next(_numbers)
        if is_single(steps):
            self._whole = steps[0].model
        else:
            fallback = None
            if may_fall_back:
                names = " + ".join(dict.fromkeys(step.device for step in steps))
                fallback = CpuFallback(model, options.preference, "whole", names, fallbacks=fallbacks)
            executor = together(model, steps, fallback)
            self._whole = FallbackExecutor(executor, fallback, len(steps) if isinstance(executor, StepsExecutor) else 1)
        super().__init__(SharedBuffersExecutor(self._whole, self._number), options.preference)

    @property
    def prepared(self) -> Executor:
        """The executor that is used now: the model on its device, in steps, or on the CPU."""
        return self._whole.prepared

    def placement(self) -> Placement:
        """Return what runs where now: (device, indices of operations of the main subgraph) of each step, in order.

        An IF or WHILE whose graphs run apart is there once for "cpu", which decides, and once for each device in them.

        Its `figures` are the seconds of one execution of each plan that was compared; its `capabilities` say of each
        device whether its driver has stated them or Burst has measured them.
        """
        if self._whole.is_replaced:
            return Placement([(NAME, tuple(range(len(self.model.main.operations))))], self._figures, self._capabilities)
        steps = []
        for p in self._steps:
            steps += [
                (device, p.step.operations) for device in dict.fromkeys([_place(p), *map(_place, inner_steps(p))])
            ]
        return Placement(steps, self._figures, self._capabilities)

    def __repr__(self) -> str:
        where = " + ".join(dict.fromkeys(device for device, _ in self.placement()))
        return f"<CompiledModel on {where}: {signature(self.model)}>"

    def serve(
        self,
        *,
        replicas: int = 2,
        queue: int = 64,
        batch: int | None = None,
        batch_window: float | None = None,
        depth: int = 2,
        warm_up: bool = True,
        recover: bool = True,
        shapes: InputShapes | None = None,
        name: str = "",
    ) -> Serving:
        """Serve many callers at once.

        `async with model.serve() as server` gives a `driver.replicas.ModelServer`, whose `run` any task of this event
        loop awaits; `with model.serve() as server` gives a `BlockingServer`, for any thread.

        Args:
            replicas: bursts on this model, each of which the device serves in a thread.
            queue: requests that may wait. One more gets QueueFull, at once.
            batch: rows that may run together, for a model whose first dimension is open: requests that wait are joined,
                and sent as one, if that gives more rows a second. None: those of `compile(batch=)`, or 1.
            batch_window: seconds that a request waits for others, while others have lately come; None: 0.002, or what
                `compile(batch=)` says where `batch` is left to it.
            depth: executions of each replica that may be in flight: the next one waits in the device.
            warm_up: runs each replica on zeros before the first request, where the shapes are known, and measures
                whether `batch` pays.
            recover: a device that dies is started again, and has the requests once more.
            shapes: of the inputs of one request, where the model leaves more than the first dimension open.
            name: for statistics and errors.

        The end of the block drains: it takes no more requests and finishes those that it has; after an exception it
        ends them. Raise ValueError.
        """
        from driver.replicas import ServeOptions, Serving  # they import asyncio

        terms = self._batch if batch is None and self._batch else Batch(1 if batch is None else batch, _WINDOW)
        options = ServeOptions(
            replicas,
            queue,
            terms.rows,
            terms.window if batch_window is None else batch_window,
            depth=depth,
            warm_up=warm_up,
            recover=recover,
            shapes=shapes,
            name=name,
        )
        return Serving(self, options.checked(self.model))

    def allocate(
        self, desc: BufferDesc, input_roles: Sequence[BufferRole] = (), output_roles: Sequence[BufferRole] = ()
    ) -> Buffer:
        """Allocate a buffer as `driver.allocate` does, for this model alone: the `model_index` of each role is 0."""
        return allocate(desc, [self], input_roles, output_roles)

    @property
    def number(self) -> int:
        """The number by which the roles of buffers mean this model."""
        return self._number

    def step_roles(self, io_index: int, *, is_input: bool) -> list[StepRole]:
        """Return which steps read and write that input or output. Raise ValueError."""
        if self._is_closed:
            raise ValueError(CLOSED)
        operand = (self.model.main.inputs if is_input else self.model.main.outputs)[io_index]
        found = []
        for prepared, inputs, outputs in self._placed():
            found += [StepRole(prepared, True, n) for n, i in enumerate(inputs) if i == operand]
            found += [StepRole(prepared, False, n) for n, i in enumerate(outputs) if i == operand]
        return found

    def _placed(self) -> list[tuple[Any, Sequence[int], Sequence[int]]]:
        """Return, for each step, its executor now, and its inputs and outputs among the main subgraph's operands."""
        if isinstance(self.prepared, StepsExecutor | OpenSteps):
            return [(each.model.prepared, each.step.inputs, each.step.outputs) for each in self._steps]
        return [(self.prepared, self.model.main.inputs, self.model.main.outputs)]

    def stats(self) -> dict[str, Any]:
        """Return `placement`, `fallbacks` and `compilations`.

        `fallbacks`: how often a device was dropped when compiling, and how often the whole model was compiled for the
        CPU instead, or a step or the whole executed there; with the last reasons.

        `compilations`: of each step, its device; whether it came out of the cache (`restored`), was made anew and is
        kept (`saved`), or is not (`compiled`), and why; and its `stage`: how often the device has replaced it by
        something better since.
        """
        compilations = [each.compilation() for step in self._steps for each in (step, *inner_steps(step))]
        return {"placement": self.placement(), "fallbacks": self._fallbacks.report(), "compilations": compilations}

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a recipe that compiles the model again, for devices of the same names, wherever it is unpickled."""
        return self._recipe

    def close(self) -> None:
        """Free the model on its devices. Bursts end with the connections that `compile` made."""
        self._is_closed = True
        super().close()
        for device in self._devices:
            device.close()
