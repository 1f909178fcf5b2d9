"""What an engine holds beyond what clients account for, how that grows, and when it is renewed for it."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import stress
from waiting import until

import driver
from driver.engine.limits import RenewWhen, renew_when
from driver.monitor import Watcher
from driver.service.process_figures import private_bytes
from driver.service.upkeep import InstalledCode, MemoryHistory

MB = 10**6


class TestHistory:
    """The slope of its samples."""

    def test_a_leak(self):
        """What it grows by in an hour is found, whatever comes and goes meanwhile."""
        history = MemoryHistory()
        for minute in range(60):
            history.note(60.0 * minute, 100 * MB + minute * MB + 7 * MB * (minute % 2))
        assert history.growth() == pytest.approx(60 * MB, rel=0.02)

    def test_too_few(self):
        """Nothing is said of the first minutes, however often it looks."""
        history = MemoryHistory()
        for second in range(179):
            history.note(float(second), second * MB)
        assert history.growth() is None

    def test_the_last_hour_counts(self):
        """A leak that has ended is forgotten."""
        history = MemoryHistory()
        for minute in range(200):
            history.note(60.0 * minute, min(minute, 100) * MB)
        assert history.growth() == pytest.approx(0, abs=1)


class TestRenewWhen:
    """The table of limits.toml."""

    @pytest.mark.parametrize(
        ("figures", "says"),
        [
            ((11 * MB, 700.0, 0), "private_bytes"),
            ((11 * MB, 500.0, 0), ""),
            ((0, 2000.0, 0), "age"),
            ((0, 700.0, 101), "runs"),
            ((10 * MB, 1000.0, 100), ""),
        ],
    )
    def test_what_is_due(self, figures, says):
        """More than a figure is, and memory only once the engine is ten minutes old."""
        found = RenewWhen(10 * MB, 1000.0, 100).reason(*figures)
        assert (says in found) if says else not found

    def test_nothing_is_said(self, place):
        """Then no engine is renewed of itself."""
        assert renew_when() == RenewWhen()
        assert renew_when().reason(2**60, 1e9, 2**60) == ""

    @pytest.mark.parametrize("table", ["runs = 0", "runs = true", "age = '7d'", "memory = 5", "private_bytes = 1.5"])
    def test_what_makes_no_sense(self, place, table):
        """It names the file and the value; devices do not start."""
        written(table)
        with pytest.raises(ValueError, match=r"limits.toml: renew_when"):
            renew_when()


def written(table):
    path = Path(os.environ["HOME"], ".config/burst/limits.toml")
    path.parent.mkdir(parents=True)
    path.write_text(f"[renew_when]\n{table}\n")


class TestInstalledCode:
    """New code is noticed."""

    def test_a_file_that_is_replaced(self, tmp_path, monkeypatch):
        """Once it has stayed the same for a look: an installation takes its time."""
        module = tmp_path / "replaced_runtime.py"
        module.write_text("1")
        monkeypatch.syspath_prepend(str(tmp_path))
        code = InstalledCode(module.stem)
        assert code.change() == ""
        module.with_suffix(".new").write_text("2")
        module.with_suffix(".new").rename(module)
        assert [code.change(), code.change()] == ["", f"{module} was replaced"]


def test_what_a_runtime_holds(place, kit):
    """The engine's private memory is told, and of it what clients account for is not the runtime's."""
    with kit.living("reference") as device, device.prepare(kit.add_model()) as prepared:
        prepared.run(np.zeros((1, 4), np.float32))
        private, runtime, growth = device.connection.call("memory")[0]
        assert 0 < runtime < private
        assert growth is None
        (found,) = Watcher(["reference"]).sample().devices
        assert 0 < found.runtime_memory < found.engine_memory


@pytest.mark.integration
def test_an_engine_renews_itself_after_so_many_runs(place, kit):
    """The next one begins while requests go on."""
    written("runs = 100")
    with kit.living("reference") as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        first = device.connection
        for n in itertools.count():
            x = np.full((1, 4), n, np.float32)
            assert np.array_equal(burst.run(x).outputs[0], x + 1)
            if device.connection is not first:
                break
        with driver.connect("reference") as other:
            assert other.engine_pid == device.engine_pid


LEAKING, LOST_BYTES = "burst_test_devices.leaking:Leaking", 100_000  # by each run
RUNS = 1000


@pytest.mark.parametrize(
    "count", [pytest.param(5000, marks=pytest.mark.integration), pytest.param(10**5, marks=pytest.mark.stress)]
)
def test_a_driver_that_leaks(place, kit, tally, count):
    """Each run loses 100 KB. An engine is renewed soon after it has done as many as `renew_when` says, so no engine has
    lost much more than that, however many runs there are; and all results are right.
    """
    pytest.importorskip("onnxruntime", reason="needs the extra 'onnxruntime'")
    written(f"runs = {RUNS}")
    total, engines = count if count < 10**5 else stress.times(count), 0
    with kit.living(LEAKING) as device, device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        first, done, base, most = device.connection, 0, private_bytes(device.engine_pid), 0
        for n in range(total):
            x = np.full((1, 4), n, np.float32)
            assert np.array_equal(burst.run(x).outputs[0], x + 1)
            done += 1
            if done == 3 * RUNS:
                until(lambda first=first: device.connection is not first)
            if not n % 100:
                most = max(most, private_bytes(device.engine_pid))
            if device.connection is not first:
                engines, first, done = engines + 1, device.connection, 0
    tally("runs that leak", total)
    assert engines >= total // (3 * RUNS)
    assert most < base + 4 * RUNS * LOST_BYTES
