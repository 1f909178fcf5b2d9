"""Each executor, and each nesting of them, gives the same answers on every way in: status, outputs, cause and text."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from request_rows import rows
from request_ways import WAYS, Site, fill, markdown, report

import driver
from driver.recording import record

DEVICES = "reference", "litert", "onnxruntime"
PAGE = Path(__file__).parents[3] / "docs/one-request.md"


@pytest.mark.parametrize("name", DEVICES)
def test_on_a_device(connect, name):
    """On a device, each row of the table says the same by every way, and again when it is asked again."""
    if name != "reference":
        pytest.importorskip({"litert": "ai_edge_litert", "onnxruntime": "onnxruntime"}[name])
    device, other = connect(name), connect(name)
    site = Site(name, lambda model, priority: device.prepare(model, priority=priority), [device], other)
    check(site)


@pytest.mark.parametrize("name", ["FromThis", "FromInner"])
def test_in_bursts_that_run_a_prepared_model(connect, name):
    """A burst that a driver makes of a prepared model of its own says the same as the engine's."""
    device, other = (connect(f"burst_test_devices.own_bursts:{name}") for _ in range(2))
    site = Site(name, lambda model, priority: device.prepare(model, priority=priority), [device], other)
    check(site)


_ONLY_PREPARED = ("burst.execute, wire version 1",)


def test_recorded(connect, tmp_path):
    """A recorder before a device changes no answer."""
    device, other = connect(), connect()
    with record(tmp_path / "requests"):
        prepare = lambda model, priority: device.prepare(model, priority=priority)  # noqa: E731
        check(Site("recorded", prepare, [device], other, _ONLY_PREPARED))


def test_compiled(connect):
    """A compiled model on one device says the same."""
    device, other = connect(), connect()
    check(Site("compiled", lambda m, p: driver.compile(m, [device], priority=p), [device], other, _ONLY_PREPARED))


@pytest.mark.parametrize("is_recorded", [False, True], ids=["", "recorded"])
def test_with_the_cpu_behind_it(settled, tmp_path, is_recorded):
    """A compiled model that may fall back says the same; so does one that is recorded as well."""
    devices = [settled("reference", 0.1), "cpu"]
    with record(tmp_path / "requests") if is_recorded else nullcontext():
        check(Site("compiled", lambda m, p: driver.compile(m, devices, priority=p), without=_ONLY_PREPARED))


@pytest.mark.integration
@pytest.mark.parametrize("behind", [(), ("cpu",)], ids=["alone", "with the CPU behind them"])
def test_divided(settled, connect, behind):
    """A model that is divided between two devices says the same; so does one that may fall back."""
    devices = [settled("Picky", 0.5), settled("reference", 0.9), *behind]
    site = Site("divided", lambda m, p: driver.compile(m, devices, priority=p), without=_ONLY_PREPARED)
    check(site)


def test_divided_between_a_device_and_this_process(settled):
    """Steps on a device and in this process say the same."""
    devices = [settled("Picky", 0.5), "cpu"]
    check(Site("divided", lambda m, p: driver.compile(m, devices, priority=p), without=_ONLY_PREPARED))


def test_in_this_process():
    """A model that is compiled for the CPU in this process says the same."""
    site = Site("cpu", lambda m, p: driver.compile(m, ["cpu"], priority=p), without=_ONLY_PREPARED)
    check(site)


def check(site):
    cells = list(fill(site, rows()))
    assert len(cells) > 300
    assert not any(cell.wrong for cell in cells), report(cells)


def test_page():
    """docs/one-request.md has the table's rows and its ways."""
    page = PAGE.read_text()
    table = page.partition("<!-- the table: begin -->\n")[2].partition("\n<!-- the table: end -->")[0]
    assert table == markdown(rows()), "put this into the page:\n" + markdown(rows())
    for way in WAYS:
        assert f"`{way.name.partition(',')[0]}`" in page
