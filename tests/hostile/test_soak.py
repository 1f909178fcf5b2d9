"""All attacks in random order beside honest tenants of other accounts, for as long as asked.

    BURST_SOAK=7200 pytest -m stress tests/hostile/test_soak.py -s

asks for two hours; by default 20 minutes in `make stress`. BURST_SEED repeats an order.
"""

import os
import random
import time
from collections import defaultdict

import accounts
import pytest
import stress
from attacks import ATTACKS
from neighbourhood import HONEST, neighbourhood
from silent_file import NoSilentFile
from trial import SLACK, excess, trial

SECONDS = 12_000.0
OTHER_HONEST = HONEST + 100
GROWTH = {**SLACK, "resident": 600 << 20, "log": 4 << 20}
"""By how much all that the device's account holds may have grown after any number of attacks."""


class Soak:
    """One device, two honest tenants, and what they saw."""

    def __init__(self, seed, tally):
        self._random, self._tally = random.Random(seed), tally
        self.faults, self._seen = [], defaultdict(list)
        self._without = set()

    def run(self, seconds):
        """Attacks until the time is over, or one has harmed a tenant."""
        with neighbourhood() as hood, hood.tenant() as tenant, hood.tenant(OTHER_HONEST) as other:
            before, identity, end = hood.figures(), tenant.ask("identity"), time.monotonic() + seconds
            names = []
            while time.monotonic() < end and not self.faults:
                names = names or self._random.sample(list(ATTACKS), len(ATTACKS))
                self._attack(hood, tenant, other, names.pop())
            if not self.faults:
                self._judge(hood, tenant, before, identity)

    def _attack(self, hood, tenant, other, name):
        if name in self._without:
            return
        try:
            outcome = trial(hood, tenant, name, looks=self._random.choice([1, 1, 2, 3]))
        except NoSilentFile:
            self._without.add(name)
            return
        self._tally("attacks beside tenants")
        self._seen[name].append(outcome)
        look = other.ask("look")
        stuck = [f"the second tenant, {step}: {found}" for step, found in look.items() if isinstance(found, str)]
        self.faults += [f"{name}: {fault}" for fault in outcome.faults + stuck]

    def _judge(self, hood, tenant, before, identity):
        after = tenant.ask("identity")
        if [after[key] for key in ("service", "engine")] != [identity[key] for key in ("service", "engine")]:
            self.faults.append("other processes serve the tenant")
        grown = excess(before, hood.figures())
        self.faults += [f"{name} grew by {more}" for name, more in grown.items() if more > GROWTH[name]]

    def table(self):
        """A line per attack: how often, and the worst that the tenant noticed."""
        lines = [f"{'attack':28} {'times':>5} {'p99 us':>9} {'prepare s':>9} {'MiB':>6} {'descriptors':>11}"]
        for name, outcomes in sorted(self._seen.items()):
            p99 = max(o.bursts.get("p99", 0.0) for o in outcomes) * 1e6
            prepare = max((s for o in outcomes for s in o.prepares), default=0.0)
            most = [o.most for o in outcomes if o.most]
            resident, fds = (max((getattr(m, key) for m in most), default=0) for key in ("resident", "descriptors"))
            lines.append(f"{name:28} {len(outcomes):5} {p99:9.0f} {prepare:9.2f} {resident >> 20:6} {fds:11}")
        return "\n".join(lines)


@pytest.mark.stress
def test_soak(tally):
    """Tenants are served all the time, by the same processes, which hold no more at the end than at first."""
    if why := accounts.missing():
        pytest.skip(why)
    seed = int(os.environ.get("BURST_SEED", random.randrange(2**31)))
    seconds = float(os.environ.get("BURST_SOAK", SECONDS * stress.BUDGET))
    soak, begin = Soak(seed, tally), time.monotonic()
    soak.run(seconds)
    took = time.monotonic() - begin
    tally("seconds beside attackers", round(took))
    print(f"\nseed {seed}, {took:.0f} s\n{soak.table()}")
    assert soak.faults == []
