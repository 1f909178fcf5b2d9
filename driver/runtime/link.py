"""A step's burst in a chain: on its device, and on the CPU in this process when that fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import PeerDied
from driver.client.burst import Burst
from driver.client.pipeline import Pipeline
from driver.client.prepared_model import RemotePreparedModel
from driver.client.session import FAILURES
from driver.runtime.local import LocalBurst
from driver.runtime.places import Aimed, StepInputs

if TYPE_CHECKING:
    from driver.options import Options
    from driver.runtime.plan import Part


class Link:
    """A step's burst, and what takes its place."""

    def __init__(self, part: Part, options: Options) -> None:
        self.part, self._options, self.aimed = part, options._replace(policy="block"), Aimed()
        prepared = part.guarded.prepared
        self.burst: Burst | LocalBurst
        self._pipeline: Pipeline | None = None
        if isinstance(prepared, RemotePreparedModel):
            prepared.check_quarantine()
            self._pipeline = Pipeline(prepared, self._options, self.aimed)
            self.burst = Burst(self._pipeline)
        else:
            self.burst = LocalBurst(prepared, self._options, self.aimed)

    @property
    def device(self) -> str:
        """Where the step is executed now."""
        return "cpu" if isinstance(self.burst, LocalBurst) else self.part.device

    def look(self) -> None:
        """Takes the results that have arrived, and calls back."""
        if self._pipeline:
            self._pipeline.look()

    def did_instead(self, error: BaseException, reads: StepInputs, writes: Any) -> bool:
        """Executes the step on the CPU, if it was not there that it failed. From now on, if its device has died."""
        guarded = self.part.guarded
        if guarded.spare is None or isinstance(self.burst, LocalBurst):
            return False
        spare = guarded.again(error)
        burst = LocalBurst(spare, self._options, _aimed_at(reads, writes))
        if isinstance(error, PeerDied):
            old, self.burst = self.burst, LocalBurst(spare, self._options, self.aimed)
            old.close()
            self._pipeline = None
        try:
            burst.run()
        except FAILURES:
            return False
        return True


def _aimed_at(reads: StepInputs, writes: Any) -> Aimed:
    aimed = Aimed()
    aimed.aim(reads, writes)
    return aimed
