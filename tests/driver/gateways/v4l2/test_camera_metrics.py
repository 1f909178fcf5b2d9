"""Figures of cameras at a scrape, as the page has an application serve them."""

import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parsed

import burst
import driver

PAGE = Path(__file__).parents[4] / "docs/howto/camera.md"


def opened(fake, **how):
    return driver.Camera(fake.path, ioctl=fake.ioctl, **how)


def begun(fake, **how):
    """A camera whose stream runs, without a frame yet."""
    camera = opened(fake, **how)
    with pytest.raises(burst.Timeout):
        camera.next_frame(timeout=0)
    return camera


def samples(text):
    """By name, camera and outcome."""
    found = [sample for family in parsed(text) for sample in family.samples if sample.name.startswith("burst_camera_")]
    return {(s.name.removeprefix("burst_camera_"), *s.labels.values()): s.value for s in found}


@pytest.fixture
def scrape():
    """Asks a registry of its own."""
    registry = CollectorRegistry()
    registry.register(driver.Camera.collector())
    return lambda: samples(generate_latest(registry).decode())


def test_counts_by_camera(fake, scrape):
    """Frames by what became of them, what is held and what was copied, for each open camera under its path."""
    first, second = fake(), fake()
    assert scrape() == {}
    with begun(first, newest=True) as camera, begun(second) as other:
        for _ in range(3):
            first.shoot()
        second.shoot(nbytes=10)
        second.shoot()
        camera.next_frame()
        other.next_frame().release()
        found = scrape()
        outcomes = ("taken", "missed", "skipped", "damaged")
        assert [found["frames_total", first.path, outcome] for outcome in outcomes] == [1, 0, 2, 0]
        assert [found["frames_total", second.path, outcome] for outcome in outcomes] == [1, 0, 0, 1]
        assert (found["held", first.path], found["held", second.path]) == (1, 0)
        assert (found["buffers", first.path], found["copied_bytes_total", first.path]) == (4, 0)
    assert scrape() == {}  # a camera that is closed has none


def test_the_age_of_a_frame(fake, scrape):
    """None before the first; then it grows until the next one, so a camera that hangs is seen."""
    source = fake()
    with begun(source) as camera:
        assert camera.age is None
        assert ("frame_age_seconds", source.path) not in scrape()
        source.shoot()
        camera.next_frame().release()
        first, second = (scrape()["frame_age_seconds", source.path] for _ in range(2))
        assert 0 <= first < second
        assert camera.age > second


def test_a_path_that_is_opened_twice(fake, scrape):
    """Its figures are summed: one path is one camera, and a scrape has each name once."""
    source = fake()
    with opened(source), opened(source):
        assert scrape()["buffers", source.path] == 8


def test_the_block_of_the_page_serves_them(fake):
    """docs/howto/camera.md: the program serves the figures of a camera that it opens later."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "Camera.collector()" in block]
    server, names = None, {}
    try:
        exec(compile(block, str(PAGE), "exec"), names)
        server = names["server"]
        source = fake(free_running=True)
        with opened(source) as camera:
            camera.next_frame().release()
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
                found = samples(answer.read().decode())
            assert found["frames_total", source.path, "taken"] == 1
    finally:
        if server:
            names["REGISTRY"].unregister(names["collector"])
            server.shutdown()
            server.server_close()
