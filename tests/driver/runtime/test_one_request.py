"""The same request has the same answer on every way in, at every site: status, outputs, cause and text."""

from pathlib import Path

import pytest
from request_rows import rows
from request_ways import WAYS, Site, fill, markdown, report

import driver

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


_ONLY_PREPARED = ("burst.execute, wire version 1",)


def test_compiled(connect):
    """A compiled model on one device says the same."""
    device, other = connect(), connect()
    site = Site("compiled", lambda m, p: driver.compile(m, [device], priority=p), [device], other, _ONLY_PREPARED)
    check(site)


@pytest.mark.integration
def test_divided(settled, connect):
    """A model that is divided between two devices says the same."""
    devices = [settled("Picky", 0.5), settled("reference", 0.9)]
    site = Site("divided", lambda m, p: driver.compile(m, devices, priority=p), without=_ONLY_PREPARED)
    check(site)


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
