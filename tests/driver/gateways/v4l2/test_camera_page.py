"""docs/howto/camera.md: its program for a camera's own buffers."""

from functools import partial
from pathlib import Path

import pytest

import driver

PAGE = Path(__file__).parents[4] / "docs/howto/camera.md"


@pytest.mark.parametrize(("fourcc", "channels"), [("NV12", 1), ("YUYV", 2)])
def test_the_program_of_the_page_runs_until_the_camera_is_unplugged(home, fake, monkeypatch, capsys, fourcc, channels):
    """On a camera that delivers nv12 and on a webcam: a line for each frame with its values, then CameraLost."""
    (block,) = [block for block in PAGE.read_text().split("```")[1::2] if "camera = driver.Camera(" in block]

    def fill(number, room):
        room.fill(10 * number)
        if number == 8:
            source.unplug()

    source = fake(formats=("MJPG", fourcc), fill=fill, free_running=True)
    monkeypatch.setattr(driver, "Camera", partial(driver.Camera, ioctl=source.ioctl))
    with pytest.raises(driver.CameraLost, match="was unplugged"):
        exec(compile(block.replace("/dev/video0", source.path), str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        number, values = line.split(" ", 1)
        assert values == str([[10 * int(number)] * channels])
