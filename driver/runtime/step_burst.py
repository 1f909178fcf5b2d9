"""A step's burst in a chain: on its device, and on the CPU in this process when that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burst import PeerDied
from driver.client.burst import Burst
from driver.client.pipeline import Pipeline
from driver.client.prepared_model import RemotePreparedModel
from driver.client.session import FAILURES
from driver.runtime.local import LocalBurst
from driver.runtime.places import StepBuffers

if TYPE_CHECKING:
    from driver.options import Options
    from driver.runtime.places import StepInputs, StepOutputs
    from driver.runtime.plan import PreparedStep


class StepBurst:
    """A step's burst, and what takes its place."""

    def __init__(self, prepared: PreparedStep, options: Options) -> None:
        self.prepared, self._options, self.buffers = prepared, options._replace(policy="block"), StepBuffers()
        model = prepared.model.prepared
        self.burst: Burst | LocalBurst
        self._pipeline: Pipeline | None = None
        if isinstance(model, RemotePreparedModel):
            model.check_quarantine()
            self._pipeline = Pipeline(model, self._options, self.buffers)
            self.burst = Burst(self._pipeline)
        else:
            self.burst = LocalBurst(model, self._options, self.buffers)

    @property
    def device(self) -> str:
        """Where the step is executed now."""
        return "cpu" if isinstance(self.burst, LocalBurst) else self.prepared.device

    def look(self) -> None:
        """Takes the results that have arrived, and calls back."""
        if self._pipeline:
            self._pipeline.look()

    def fell_back(self, error: BaseException, reads: StepInputs, writes: StepOutputs) -> bool:
        """Execute the step on the CPU, unless it failed there. From now on, if its device has died."""
        model = self.prepared.model
        if model.fallback is None or isinstance(self.burst, LocalBurst):
            return False
        local, buffers = model.burst_replacement(error), StepBuffers()
        buffers.aim(reads, writes)
        burst = LocalBurst(local, self._options, buffers)
        if isinstance(error, PeerDied):
            old, self.burst = self.burst, LocalBurst(local, self._options, self.buffers)
            old.close()
            self._pipeline = None
        try:
            burst.run()
        except FAILURES:
            return False
        return True
