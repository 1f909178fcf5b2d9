"""What several files of streams begin with."""

import pytest
from counters import counter


@pytest.fixture
def counting(device):
    """A burst on the reference device."""
    with device.prepare(counter()) as prepared, prepared.burst(depth=3) as burst:
        yield burst
