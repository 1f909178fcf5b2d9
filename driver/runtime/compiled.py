"""What `driver.compile` returns: a model on its devices, with the CPU behind them."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from burst import PeerDied
from driver.client.burst import Burst
from driver.client.pipeline import Pipeline
from driver.client.session import FAILURES
from driver.errors import DriverError
from driver.options import options_of
from driver.runtime.fallback import BurstFallback, CpuFallback, FallbackModel, Fallbacks
from driver.runtime.local import NAME, LocalBurst, LocalPrepared
from driver.runtime.plan import PlannedModel, PreparedStep
from fmq.closing import Closing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.client.device import RemoteDevice
    from driver.client.prepared_model import RemotePreparedModel
    from driver.options import Options
    from driver.runtime.chain import Chain
    from driver.runtime.compilation import CompileOptions


class CompiledModel(FallbackModel, Closing):
    """A model on one or several devices. Any thread may use it, several at once. Made by `compile`.

    On one device it is what that device's `prepare` gives, and its burst is that device's burst.
    """

    def __init__(
        self,
        options: CompileOptions,
        steps: Sequence[PreparedStep],
        devices: Sequence[RemoteDevice],
        fallbacks: Fallbacks,
    ) -> None:
        """Use `compile`. `devices`: connections to be closed with it."""
        self.model = options.model
        self.preference, self.priority = options.prepare.preference, options.prepare.priority
        self._steps, self._devices, self._fallbacks = steps, devices, fallbacks
        self._is_closed, self._options = False, options
        if len(steps) == 1:
            super().__init__(steps[0].model.prepared, steps[0].model.fallback)
        else:
            fallback = None
            if options.may_fall_back:
                names = " + ".join(dict.fromkeys(step.device for step in steps))
                fallback = CpuFallback(options.model, self.preference, "whole", names, fallbacks)
            super().__init__(PlannedModel(options.model, steps, self.preference, fallback), fallback)

    def placement(self) -> list[tuple[str, tuple[int, ...]]]:
        """What runs where now: (device, indices of operations of the main subgraph) of each step, in order."""
        if self.is_replaced:
            return [(NAME, tuple(range(len(self.model.main.operations))))]
        return [(NAME if p.model.is_replaced else p.device, p.step.operations) for p in self._steps]

    def burst(self, **options: Any) -> Burst | Chain | LocalBurst:
        """Opens a burst, with the options of `RemotePreparedModel.burst`.

        On one device it is that device's, on several a chain of them. Raises StatusError, PeerDied, ValueError.
        """
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again")
        its = options_of(self.preference, **options)
        try:
            return self._burst(its)
        except FAILURES as error:
            return LocalBurst(self.replacement(error), its)

    def _burst(self, options: Options) -> Burst | Chain | LocalBurst:
        prepared: RemotePreparedModel | LocalPrepared | PlannedModel = self.prepared
        if isinstance(prepared, PlannedModel):
            return prepared.burst(options)
        if isinstance(prepared, LocalPrepared):
            return LocalBurst(prepared, options)
        if self.fallback is None:
            return prepared.burst(**options._asdict())
        prepared.check_quarantine()
        return Burst(Pipeline(prepared, options, fallback=BurstFallback(self, self.fallback)))

    def replacement(self, error: BaseException) -> LocalPrepared:
        """As `FallbackModel.replacement`, unless it is closed."""
        if self._is_closed:
            raise ValueError("this compiled model is closed; compile it again") from error
        return super().replacement(error)

    def stats(self) -> dict[str, Any]:
        """`placement`, and `fallbacks`: how often a device was dropped when compiling, and how often the whole model
        was compiled for the CPU instead, or a step or the whole executed there; with the last reasons.

        `compilations`: of each step, its device; whether it came out of the cache (`restored`), was made anew and is
        kept (`saved`), or is not (`compiled`), and why; and its `stage`: how often the device has replaced it by
        something better since.
        """
        compilations = [step.compilation() for step in self._steps]
        return {"placement": self.placement(), "fallbacks": self._fallbacks.report(), "compilations": compilations}

    def __reduce__(self) -> tuple[Any, ...]:
        """A recipe: compiles the model again, for devices of the same names, wherever it is unpickled."""
        from driver.runtime.compilation import compile_again

        return compile_again, (self._options,)

    def close(self) -> None:
        """Frees the model on its devices. Bursts end with the connections that `compile` made."""
        self._is_closed = True
        with suppress(PeerDied, DriverError):
            self.prepared.close()
        for device in self._devices:
            device.close()
