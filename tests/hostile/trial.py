"""One attack beside an honest tenant, and what the tenant noticed of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from neighbourhood import Stuck
from waiting import until

if TYPE_CHECKING:
    from neighbourhood import Figures, Neighbourhood, Talker

STEP = 10.0  #: seconds that a step of an honest client may take during an attack
P99 = 0.25  #: seconds; both are for any machine under any load. `bench/neighbours.py` holds the ratios
PREPARE = 15.0
SLACK = {"descriptors": 60, "mappings": 2500, "threads": 40, "resident": 400 << 20, "log": 1 << 20}
"""By how much the device may have grown when the attacker is gone: pools of threads and allocators keep some."""
MOST_RESIDENT = 1 << 30  #: bytes more while the attack goes on: what one account may hold, and an engine of its own


ROW = "{:10} {:32} {:>9} {:>9}  {}"
HEAD = ROW.format("engine", "attack", "p99 us", "prepare s", "outcome")


@dataclass
class Outcome:
    """What was seen."""

    name: str
    faults: list[str] = field(default_factory=list)  #: what a claim says cannot be
    said: list[str] = field(default_factory=list)  #: by the attacker
    looks: list[dict[str, Any]] = field(default_factory=list)
    bursts: dict[str, float] = field(default_factory=dict)
    prepares: list[float] = field(default_factory=list)
    most: Figures | None = None  #: while it went on
    left: Figures | None = None  #: after it

    def __str__(self) -> str:
        p99 = f"p99 {self.bursts['p99'] * 1e6:.0f} us" if "p99" in self.bursts else f"bursts {self.bursts}"
        longest = f"prepare {max(self.prepares):.2f} s" if self.prepares else "no prepare"
        return f"{self.name}: {p99}, {longest}; at most {self.most}; {'; '.join(self.faults) or 'nothing noticed'}"

    def row(self, engine: str) -> str:
        """A line under HEAD: what the tenant felt of it."""
        p99 = f"{self.bursts['p99'] * 1e6:.0f}" if "p99" in self.bursts else "-"
        longest = f"{max(self.prepares):.2f}" if self.prepares else "-"
        return ROW.format(engine, self.name, p99, longest, "; ".join(self.faults)[:200] or "held")


def trial(hood: Neighbourhood, tenant: Talker, name: str, looks: int = 2) -> Outcome:
    """Runs the attack until the tenant has looked so many times. The tenant and the device live before it."""
    outcome = Outcome(name)
    before, figures = tenant.ask("identity"), hood.figures()
    with hood.attacker(name) as attacker:
        try:
            wait_for_work(attacker, outcome)
            for _ in range(looks):
                watch(hood, tenant, outcome)
            outcome.most = hood.figures()
            if (grown := outcome.most.resident - figures.resident) > MOST_RESIDENT:
                outcome.faults.append(f"the device has grown by {grown >> 20} MiB")
        except (Stuck, OSError, ValueError) as error:
            outcome.faults.append(f"the tenant: {type(error).__name__}: {str(error)[:200] or 'it ended'}")
            return outcome
        if attacker.process.poll() is not None:
            outcome.faults.append("the attacker itself has ended: it attacks nothing")
    check_after(hood, tenant, outcome, before, figures)
    return outcome


def wait_for_work(attacker: Talker, outcome: Outcome, patience: float = 60.0) -> None:
    """Until the attack's first round is over. Raises Stuck."""
    end = time.monotonic() + patience
    while (said := attacker.line(max(0.0, end - time.monotonic()))) and said != "at work\n":
        outcome.said.append(said.strip())


def watch(hood: Neighbourhood, tenant: Talker, outcome: Outcome) -> None:
    """The tenant does everything once. Raises Stuck."""
    look = tenant.ask("look")
    outcome.looks.append(look)
    for step, found in look.items():
        if isinstance(found, str):
            outcome.faults.append(f"{step}: {found}")
        elif found > STEP:
            outcome.faults.append(f"{step} took {found:.1f} s")
    outcome.bursts = tenant.ask("bursts", 0.5)
    if outcome.bursts.get("p99", 0.0) > P99 or "error" in outcome.bursts:
        outcome.faults.append(f"bursts: {outcome.bursts}")
    found = tenant.ask("prepares", 1)
    if isinstance(found, dict):
        outcome.faults.append(f"prepares: {found['error']}")
        return
    outcome.prepares += found
    if max(found) > PREPARE:
        outcome.faults.append(f"prepare took {max(found):.1f} s")


def check_after(
    hood: Neighbourhood, tenant: Talker, outcome: Outcome, before: dict[str, int], figures: Figures
) -> None:
    """The same processes serve, and what the attacker held is free again."""
    try:
        after = tenant.ask("identity")
    except (Stuck, OSError, ValueError) as error:
        outcome.faults.append(f"the tenant, afterwards: {type(error).__name__}: {str(error)[:200] or 'it ended'}")
        return
    if "error" in after:
        outcome.faults.append(f"the device, afterwards: {after['error']}")
        return
    if hood.process.poll() is not None:
        outcome.faults.append("the service has ended")
        return
    if (after["service"], after["engine"]) != (before["service"], before["engine"]):
        outcome.faults.append("another process serves the tenant")
    try:
        until(lambda: not excess(figures, hood.figures()), lambda: f"kept: {excess(figures, hood.figures())}")
        until(lambda: tenant.ask("identity")["bursts"] == before["bursts"], lambda: "the tenant has other bursts")
    except AssertionError as error:
        outcome.faults.append(f"the device, long after the attack: {error}")
    outcome.left = hood.figures()


def excess(before: Figures, after: Figures) -> dict[str, int]:
    """What has grown by more than it may."""
    grown = {name: getattr(after, name) - getattr(before, name) for name in before._fields}
    return {name: more for name, more in grown.items() if more > SLACK[name]}
