"""What each release wrote (tests/stored) is read today, or refused in the words of docs/compatibility.md."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import burst
import driver
import fmq
from burst import InvalidArgument, wire
from driver.protocol.model_codec import decode_valid, sealed
from driver.protocol.rpc import PROTOCOL
from driver.recording import BadRecording, Recording, replay
from driver.runtime.cache.folder import Folder

ROOT = Path(__file__).parents[2]
CALLS = {"0.1.0": 2, "0.2.0": 4}  # the version of the calls that a client of each release speaks
PAGE = (ROOT / "docs/compatibility.md").read_text()
X = [np.full((1, 4), n, np.float32) for n in range(3)]


class Stored:
    """What a release has written, and what it knew of that."""

    def __init__(self, release):
        self.release, self.folder = release, ROOT / "tests/stored" / release
        self.known = json.loads((self.folder / "known.json").read_text())

    def model(self, version=1):
        """As an engine takes it from a client; with another number in the place of its version, the first of its
        header.
        """
        frozen = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        data, where = bytearray((self.folder / "model.memory").read_bytes()), self.known["model"]
        data[where[0] + 1] = version
        return decode_valid(sealed([memory(data, frozen)], where), where)


RELEASES = [Stored(release) for release in CALLS]


@pytest.fixture(params=RELEASES, ids=lambda stored: stored.release)
def stored(request):
    return request.param


def test_each_release_has_stored_bytes():
    """Those of no release are missing, or are not looked at."""
    assert {path.parent.name for path in ROOT.glob("tests/stored/*/known.json")} == CALLS.keys()
    assert [stored.known["release"] for stored in RELEASES] == [*CALLS]


def memory(data, seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW):
    """A sealed memfd with these bytes."""
    fd = os.memfd_create("stored", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.posix_fallocate(fd, 0, len(data))
    os.pwrite(fd, data, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def is_on_the_page(error, *figures):
    """The page has the words of a refusal, with N in the place of each of these figures."""
    words = str(error.value).partition(": ")[2] if isinstance(error.value, BadRecording) else str(error.value)
    for figure in figures:
        words = words.replace(str(figure), "N", 1)
    return words in " ".join(PAGE.split())


@pytest.mark.parametrize("name", RELEASES[0].known["packets"])
def test_a_packet_of_either_wire_version_is_read_and_written_as_it_was(stored, name):
    """The bytes of a request or a result mean what they meant, and are what is sent today."""
    packet, version = bytes.fromhex(stored.known["packets"][name]), int(name[-1])
    if name.startswith("request"):
        found = wire.decode_request(packet, version)
        assert (found.slots[0], found.deadline) == ((7, None) if version == 1 else (wire.Token(5), 10**12))
        assert wire.encode_request(found, version) == packet
    else:
        found = wire.decode_result(packet, version)
        status = {"result": 0, "insufficient": 3, "late": 2 if version == 1 else 5}[name.partition("-")[0]]
        assert (int(found.status), found.id) == (status, 3 if version == 2 else 0)
        assert wire.encode_result(found, version) == packet


def test_a_queue_is_read(stored):
    """Three elements that a writer of that release left are there, in the order in which it wrote them."""
    fd = memory((stored.folder / "queue.memory").read_bytes())
    with fmq.MessageQueue.open(fmq.Descriptor.from_wire(stored.known["descriptor"], [fd])) as queue:
        assert queue.reader().read(3).tolist() == [11, 22, 33]


@pytest.mark.parametrize("at", [8, None], ids=["layout", "descriptor"])
def test_a_queue_of_another_version_is_refused(stored, at):
    """Its layout by the version on its control page, its descriptor by the first number."""
    data, plain = bytearray((stored.folder / "queue.memory").read_bytes()), [*stored.known["descriptor"]]
    if at is None:
        plain[0] = 3
    else:
        data[at] = 3
    with pytest.raises(fmq.InvalidDescriptor) as error:
        fmq.MessageQueue.open(fmq.Descriptor.from_wire(plain, [memory(data)]))
    assert is_on_the_page(error, f"{plain!r}" if at is None else 3)


def test_a_model_of_another_version_is_refused(stored):
    """Before its operands are read."""
    with pytest.raises(driver.InvalidModel) as error:
        stored.model(version=2)
    assert is_on_the_page(error, 2)


def test_a_model_computes_what_it_did(device, stored):
    """Structure and constants of a model that the release has encoded are valid, and give its results."""
    with device.prepare(stored.model()) as prepared:
        assert [prepared.run(x)[0].tolist() for x in X] == stored.known["results"]


def test_a_recording_is_replayed(device, stored):
    """All of its requests, without a difference in a bit."""
    with Recording(stored.folder / "requests.burst") as recording:
        assert recording.trouble == ""
        report = replay(recording, tolerance=0.0)
        assert (len(recording), report.compared, report.different) == (3, 3, 0)


def test_a_recording_of_another_version_is_refused(tmp_path):
    """By its first frame, before anything of it is used."""
    from driver.recording.frames import MAGIC, head, packed

    array = packed(["begin", 2, 0.0, 0, 1, "burst record"])
    (tmp_path / "new.burst").write_bytes(MAGIC + head(array, ()) + array)
    with pytest.raises(BadRecording) as error:
        Recording(tmp_path / "new.burst")
    assert is_on_the_page(error, 2, 1)


def test_a_compilation_is_made_again(tmp_path, home, stored):
    """It is listed, nothing of it is executed, and the model is compiled and kept anew beside it."""
    pytest.importorskip("onnxruntime")
    kept = shutil.copytree(stored.folder / "compiled", tmp_path / "compiled")
    for path in [kept, *kept.iterdir()]:
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    assert {entry.device for entry in Folder(kept).entries()} == {"(placement)", "onnxruntime"}
    with driver.compile(stored.model(), ["onnxruntime"], cache_dir=kept, cache_token=b"c" * 32) as compiled:
        assert [compiled.run(x)[0].tolist() for x in X] == stored.known["results"]
        assert {part["outcome"] for part in compiled.stats()["compilations"]} == {"saved"}  # not "restored"
    assert {path.name for path in kept.iterdir()} > before.keys()


def test_a_client_of_another_release_is_refused(device, stored):
    """Service and client compare the version of their calls first."""
    spoken = CALLS[stored.release]
    with pytest.raises(InvalidArgument) as error:
        device.call("hello", spoken)
    assert is_on_the_page(error, spoken, PROTOCOL)


def test_the_bytes_of_this_release_can_be_written(tmp_path, home):
    """The script that writes them gives what it gave with the last release, down to the results."""
    pytest.importorskip("onnxruntime")
    script, folder = ROOT / "tests/stored/write.py", tmp_path / "now"
    subprocess.run([sys.executable, "-P", script, folder], check=True, timeout=100)
    found, last = json.loads((folder / "known.json").read_text()), RELEASES[-1]
    assert [key for key in ("packets", "descriptor", "model", "results") if found[key] != last.known[key]] == []
    assert (folder / "model.memory").read_bytes() == (last.folder / "model.memory").read_bytes()
    with Recording(folder / "requests.burst") as recording:
        assert len(recording) == 3
    assert {entry.device for entry in Folder(folder / "compiled").entries()} == {"(placement)", "onnxruntime"}


@pytest.mark.parametrize("package", [fmq, burst, driver], ids=lambda package: package.__name__)
def test_public_names_are_there_or_the_changelog_has_them(stored, package):
    """What the release exported is exported, or the changelog says what takes its place."""
    gone = {name for name in stored.known["names"][package.__name__] if name not in package.__all__}
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert [name for name in gone if f"`{package.__name__}.{name}`" not in changes] == []
