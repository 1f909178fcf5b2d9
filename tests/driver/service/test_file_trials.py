"""Model files that end the process of their runtime: the client that brought one gets an error, and no other does."""

import fcntl
import os
import time
from pathlib import Path

import pytest
from burst_test_devices.filer import LAST_WORDS
from worded_files import FILER, X, file_model

import driver
from burst import GeneralFailure, InvalidArgument
from driver.service.fork_server import LastWords


@pytest.fixture
def filer(home, kit):
    with kit.living(FILER) as device:
        yield device


def loads():
    """How often the device has loaded a file, in whatever process."""
    counted = Path(os.environ["HOME"]) / "loads"
    return len(counted.read_text()) if counted.exists() else 0


def end(device, process):
    """Ends a device that has just learnt of a file."""
    service = process(device.service_pid)
    device.close()
    process(device.engine_pid).kill()
    assert service.has_ended()


WAYS = [("crash", "SIGSEGV"), ("abort", "SIGABRT"), ("murmur", "SIGABRT"), ("exit", "exit status 3")]


@pytest.mark.parametrize("when", ["load", "run"])
@pytest.mark.parametrize(("what", "how"), WAYS)
def test_a_file_that_ends_its_trial(filer, process, when, what, how):
    """Its client is told how and with which last words; the same client's other models and the engine live on."""
    engine = filer.engine_pid
    with filer.prepare(file_model(f"a neighbour of {when} {what}")) as neighbour, neighbour.burst() as burst:
        with pytest.raises(GeneralFailure, match=f"is quarantined on this device now: .* {how}") as caught:
            filer.prepare(file_model(f"{when}:{what}"))
        assert (LAST_WORDS.decode().strip() in str(caught.value)) == (what in {"abort", "murmur"})
        assert (burst.run(X).outputs[0] == 1).all()
    before = loads()
    with pytest.raises(GeneralFailure, match=f"is quarantined on this device: .* {how}"):
        filer.prepare(file_model(f"{when}:{what}"))
    assert loads() == before
    assert not process(engine).has_ended(0)


def test_a_file_that_writes_without_end(filer):
    """No more of it is kept than a pipe holds, and the last words are told."""
    with pytest.raises(GeneralFailure, match=r"again again of all that, 0 bytes are kept"):
        filer.prepare(file_model("load:flood"))


def test_a_process_that_enlarges_its_pipe():
    """Its last words are told, however much lies in the pipe before them."""
    words = LastWords()
    fcntl.fcntl(words.writable, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.write(words.writable, b"again\n" * 100_000 + LAST_WORDS)
    assert words.finish().endswith(f"again {LAST_WORDS.decode().strip()}")


def test_a_file_that_was_tried_once(filer, kit, process):
    """A file is loaded twice when it is new, and once from then on, after a restart of the device, too."""
    for times in (2, 1):
        before = loads()
        with filer.prepare(file_model("new")) as prepared:
            assert (prepared.run(X)[0] == 1).all()
            assert loads() - before == times
    end(filer, process)
    before = loads()
    with kit.living(FILER) as device, device.prepare(file_model("new")):
        assert loads() - before == 1


def test_quarantine_outlives_the_device(filer, kit, process):
    """A file that is quarantined is refused after a restart of the device without another trial."""
    with pytest.raises(GeneralFailure, match="now"):
        filer.prepare(file_model("load:crash for good"))
    end(filer, process)
    before = loads()
    with kit.living(FILER) as device, pytest.raises(GeneralFailure, match="is quarantined on this device: "):
        device.prepare(file_model("load:crash for good"))
    assert loads() == before


def test_a_file_that_is_refused(filer):
    """A refusal is the runtime's own words, and no reason for a quarantine; the engine does not load the file."""
    for _ in range(2):
        before = loads()
        with pytest.raises(InvalidArgument, match=r"^the file has no head"):
            filer.prepare(file_model("load:refuse"))
        assert loads() - before == 1


def test_a_long_first_run(filer):
    """A file whose first run takes long is prepared all the same."""
    with filer.prepare(file_model("run:sleep")):
        pass


def test_a_deadline_ends_a_trial(filer):
    """A preparation ends at its deadline while its trial goes on, and the file is tried again the next time."""
    with pytest.raises(driver.MissedDeadlinePersistent):
        filer.prepare(file_model("load:sleep"), deadline=time.monotonic() + 0.3)
