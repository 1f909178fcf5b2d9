"""One account attacks a device that serves a group; a tenant of another account does not notice."""

from contextlib import ExitStack

import accounts
import pytest
from attacks import ATTACKS
from attacks_on_memory import sealed_chain
from neighbourhood import neighbourhood
from silent_file import NoSilentFile
from trial import HEAD, ROW, trial

from driver.protocol.model_codec import decode_valid, sealed

pytestmark = pytest.mark.integration

FINDINGS = ("C1", "C2a", "C2b", "C2c", "H1", "H2", "H3", "H4", "H5", "H6", "H7", "M2", "M3", "M4")
"""Of the review, where an account attacks a served device: M1, L1 and L2 are about what a first client passes on."""
OFTEN = {
    *(("engines", name) for name in ("truncated_queues", "sparse_pools", "descriptors_on_their_way", "silent_pools")),
    *(("one engine", name) for name in ("lingering_contexts", "many_pools", "noise")),
}


class Served:
    """A device that is served to a group; another one in its place when an attack has harmed it."""

    def __init__(self, stack):
        self._stack, self._hood, self._device = stack, None, ""

    def whole(self, device):
        """One that works."""
        if self._device != device:
            self.drop()
            self._hood, self._device = self._stack.enter_context(neighbourhood(device)), device
        return self._hood

    def drop(self):
        """It is harmed."""
        self._stack.close()
        self._hood, self._device = None, ""


@pytest.fixture(scope="module")
def served():
    if why := accounts.missing():
        pytest.skip(why)
    with ExitStack() as stack:
        yield Served(stack)


def test_every_finding_is_an_attack():
    """None of them is left out, and each attack says what it does."""
    assert {attack.finding for attack in ATTACKS.values()} - {"new"} == set(FINDINGS)
    assert all(attack.claim.endswith((".", "at work")) for attack in ATTACKS.values())


def test_models_that_take_long_are_valid():
    """A device does not refuse them at once, which would be no attack."""
    fd, where = sealed_chain(3)
    model = decode_valid(sealed([fd], where), where)
    assert [operation.type for operation in model.main.operations] == ["ADD"] * 3


DEVICES = {"engines": "reference", "one engine": "burst_test_devices.single:Accelerator"}
KINDS = {device: kind for kind, device in DEVICES.items()}
CASES = [
    pytest.param(
        device, name, id=f"{kind}-{name}", marks=pytest.mark.attacks if (kind, name) in OFTEN else pytest.mark.stress
    )
    for kind, device in DEVICES.items()
    for name in ATTACKS
]


@pytest.mark.parametrize(("device", "name"), CASES)
def test_a_neighbour_notices_nothing(served, device, name, tally, table_row):
    """While the attack goes on, a tenant connects, prepares and executes in every way; the processes are the same
    afterwards, and what the attacker held is free again: where each account has an engine, and where all have one.
    """
    hood, engine = served.whole(device), KINDS[device]
    with hood.tenant() as tenant:
        try:
            outcome = trial(hood, tenant, name)
        except NoSilentFile as error:
            table_row(HEAD, ROW.format(engine, name, "-", "-", f"not tried: {error}"))
            pytest.skip(str(error))
    print(outcome)
    tally("attacks")
    table_row(HEAD, outcome.row(engine))
    if outcome.faults:
        told = "\n".join((str(outcome), *outcome.said, hood.log_end()))
        served.drop()
        pytest.fail(told)
