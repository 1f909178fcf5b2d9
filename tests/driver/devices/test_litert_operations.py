"""Every operation that the litert device claims, against the reference; and what it refuses."""

import pytest

pytest.importorskip("ai_edge_litert", reason="needs the extra 'litert'")

from operation_cases import CASES, forms

from driver.devices.litert import LiteRtDevice
from driver.devices.litert.lower import LOWERINGS


@pytest.fixture(scope="module")
def litert():
    return LiteRtDevice(threads=1)


def test_all_are_tried():
    """Each operation that can be lowered has its cases here; control flow has a file of its own."""
    assert set(CASES) == set(LOWERINGS) - {"IF", "WHILE"}


@pytest.mark.integration
@pytest.mark.parametrize(("letter", "build"), forms(CASES))
def test_agrees_with_the_reference(litert, net, agrees, letter, build):
    """Claimed operations give what the reference gives, within the HAL's tolerances, for random data of each type."""
    for seed in range(3):
        assert agrees(litert, build(net(letter, seed))), f"seed {seed}"
