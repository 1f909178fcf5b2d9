"""Every operation that the onnxruntime device claims, against the reference."""

import pytest

pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")

from operation_cases import CASES, forms

from driver.devices.onnxruntime import OnnxRuntimeDevice
from driver.devices.onnxruntime.lower import LOWERINGS

MORE = {}


@pytest.fixture(scope="module")
def onnxruntime():
    return OnnxRuntimeDevice(threads=1)


def test_all_are_tried():
    """Each operation that can be lowered has its cases here."""
    assert {*CASES, *MORE} == set(LOWERINGS)


@pytest.mark.parametrize(
    ("letter", "build"), forms({name: [*CASES.get(name, ()), *MORE.get(name, ())] for name in LOWERINGS})
)
def test_agrees_with_the_reference(onnxruntime, net, agrees, letter, build):
    """Claimed operations give what the reference gives, within the HAL's tolerances, for random data of each type."""
    for seed in range(3):
        assert agrees(onnxruntime, build(net(letter, seed))), f"seed {seed}"
