"""Cameras that answer the ioctls of V4L2 without a kernel."""

from contextlib import ExitStack

import pytest
from fake_camera import FakeCamera


@pytest.fixture
def fake(tmp_path):
    """Makes fakes; they end with the test."""
    with ExitStack() as stack:

        def make(**how):
            camera = FakeCamera(tmp_path / f"video{len(list(tmp_path.iterdir()))}", **how)
            stack.callback(camera.close)
            return camera

        yield make
