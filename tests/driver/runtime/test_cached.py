"""Compilations that are kept in a folder: found again when they are the same, and never when they are not."""

import contextlib
import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import stress

import driver
from driver.client.device import RemoteDevice
from driver.runtime.cache import device as cached
from driver.runtime.cache.folder import Folder
from driver.runtime.cache.manifest import Counts
from driver.runtime.cache.verify import PLACEMENT, verify

X = np.arange(4, dtype=np.float32)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def compiled(place, folder):
    """compiled(model, …): on the reference device, with the folder; closed after the test."""
    with contextlib.ExitStack() as stack:

        def compile_(model, devices=("reference",), **options):
            options = {"cache_dir": folder} | options
            return stack.enter_context(driver.compile(model, list(devices), **options))

        yield compile_


def outcomes(model):
    return [step["outcome"] for step in model.stats()["compilations"]]


def entries(folder):
    """Those of devices."""
    return [entry for entry in Folder(folder).entries() if entry.device != PLACEMENT]


def adder(number=1, size=4):
    """x + number."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (size,))
    builder.output(builder.operation("ADD", x, np.full(size, number, np.float32), 0))
    return builder.build()


def test_the_second_time_it_is_restored(compiled, place, folder):
    """By this process, and by a device that was started anew: with the same results on both paths."""
    first = compiled(adder())
    assert outcomes(first) == ["saved"]
    place.clear()
    for _ in range(2):
        again = compiled(adder())
        assert outcomes(again) == ["restored"]
        np.testing.assert_array_equal(again.run(X)[0], X + 1)
        with again.burst() as burst:
            np.testing.assert_array_equal(burst.run(X).outputs[0], X + 1)
    (entry,) = entries(folder)
    assert (entry.device, entry.hits, entry.model) == ("reference", 2, "1 operation: 1 ADD")


def test_nothing_is_asked_or_sent_the_second_time(compiled, monkeypatch):
    """What runs where is remembered, and the model does not travel."""
    compiled(adder())

    def never(*_, **__):
        raise AssertionError("asked")

    monkeypatch.setattr(RemoteDevice, "supported_operations", never)
    monkeypatch.setattr(RemoteDevice, "home_of", never)
    assert outcomes(compiled(adder())) == ["restored"]


def test_every_step_is_kept(settled, runtime_kit, folder):
    """A model on several devices has an entry for each step that is not the CPU's."""
    picky = settled("Picky")
    for expected in (["saved", "saved", "saved"], ["restored", "restored", "restored"]):
        settled("reference", 0.9)
        with driver.compile(runtime_kit.mixed_model(), [picky, "reference"], cache_dir=folder) as model:
            assert outcomes(model) == expected
            for ours, theirs in zip(model.run(X), runtime_kit.mixed(X), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert {entry.device for entry in entries(folder)} == {picky, "reference"}


@pytest.mark.integration
@pytest.mark.parametrize(
    "change",
    [
        {"model": adder(2)},
        {"model": adder(1, 5)},
        {"preference": "low_power"},
        {"priority": "high"},
        {"cache_token": bytes(32)},
        {"processor": "another"},
        {"release": "another"},
        {"version": "another"},
    ],
    ids=str,
)
def test_what_is_another_compilation_is_not_restored(compiled, monkeypatch, change):
    """Another model, in constants or in structure; other terms; another application's token, processor, library or
    device version.
    """
    compiled(adder())
    model = change.pop("model", adder())
    for name, value in change.items():
        if name in {"processor", "release"}:
            monkeypatch.setattr(
                cached, *(("__version__", value) if name == "release" else (name, lambda value=value: value))
            )
    if version := change.pop("version", None):
        monkeypatch.setattr(RemoteDevice, "version", version)
    options = {name: value for name, value in change.items() if name not in {"processor", "release"}}
    other = compiled(model, **options)
    assert outcomes(other) == ["saved"]
    expected = model.main.operands[1].value
    np.testing.assert_array_equal(other.run(np.zeros_like(expected))[0], expected)


def test_a_token_of_the_application_saves_the_hashing(compiled, monkeypatch):
    """It stands for the constants; a model of another structure is not taken for the same even so."""
    monkeypatch.setattr(cached, "model_digest", lambda *_: pytest.fail("hashed"))
    compiled(adder(), cache_token=b"t" * 32)
    assert outcomes(compiled(adder(), cache_token=b"t" * 32)) == ["restored"]
    assert outcomes(compiled(adder(1, 5), cache_token=b"t" * 32)) == ["saved"]


def test_damage_costs_a_compilation(compiled, folder, caplog):
    """What was changed is compiled anew and replaced, and stats and the log say why."""
    compiled(adder())
    (entry,) = entries(folder)
    with Folder(folder).entry(bytes.fromhex(entry.token)).opened(Counts(0, 1)) as files:
        os.pwrite(files.data[0], b"!", 3)
    with caplog.at_level(logging.WARNING, "driver.runtime"):
        again = compiled(adder())
    (step,) = again.stats()["compilations"]
    assert step["outcome"] == "saved"
    assert "changed since the device wrote them" in step["reason"]
    assert "changed since the device wrote them" in caplog.text
    np.testing.assert_array_equal(again.run(X)[0], X + 1)
    assert outcomes(compiled(adder())) == ["restored"]


def test_a_damaged_placement_is_found_anew(compiled, folder):
    """Garbage, another length, numbers of no device."""
    compiled(adder())
    (entry,) = [entry for entry in Folder(folder).entries() if entry.device == PLACEMENT]
    for garbage in (b"", b"{", b"[7]", b"[0, 0]", b"[true]", b'["0"]', b"[-1]", b"null"):
        with Folder(folder).entry(bytes.fromhex(entry.token)).opened(Counts(0, 1)) as files:
            os.ftruncate(files.data[0], 0)
            os.pwrite(files.data[0], garbage, 0)
        again = compiled(adder())
        assert outcomes(again) == ["restored"]
        np.testing.assert_array_equal(again.run(X)[0], X + 1)


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_cache(compiled, folder):
    """In which nothing can be made: the model runs, and stats say why it is not kept."""
    model = compiled(adder(), cache_dir=_tiny(folder))
    (step,) = model.stats()["compilations"]
    assert step["outcome"] == "compiled"
    assert step["reason"]
    np.testing.assert_array_equal(model.run(X)[0], X + 1)


def _tiny(folder):
    """A cache folder in which nothing can be made."""
    folder.mkdir(mode=0o700)
    if os.geteuid():
        folder.chmod(0o500)
    else:  # root may write anywhere but here
        folder.rmdir()
        folder.symlink_to("/proc/self/fdinfo")
    return folder


_COMPILE = """
import sys
import numpy as np
import driver

said = []
builder = driver.ModelBuilder()
x = builder.input("float32", (4,))
builder.output(builder.operation("ADD", x, np.ones(4, np.float32), 0))
print("ready", flush=True)
sys.stdin.readline()
with driver.compile(
    builder.build(), [sys.argv[1]], cache_dir=sys.argv[2], progress=lambda what, _: said.append(what)
) as model:
    outputs = model.run(np.arange(4, dtype=np.float32))[0].tolist()
    print(model.stats()["compilations"][0]["outcome"], outputs, any("wait" in text for text in said), flush=True)
"""


@pytest.mark.integration
def test_processes_that_compile_the_same_wait_for_one(place, kit, folder):
    """Of four that begin at once, on a device whose preparations take a while, one compiles; the others restore."""
    arguments = [sys.executable, "-c", _COMPILE, kit.odd("Thorough"), str(folder)]
    with contextlib.ExitStack() as stack, driver.connect(kit.odd("Thorough")):
        processes = [
            stack.enter_context(subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(4)
        ]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=60)[0].split(" ", 1) for process in processes]
    assert sorted(kind for kind, _ in answers) == ["restored"] * 3 + ["saved"]
    assert all("[1.0, 2.0, 3.0, 4.0]" in rest for _, rest in answers)
    assert any("True" in rest for _, rest in answers)


@pytest.mark.integration
@pytest.mark.parametrize("kills", [5, pytest.param(stress.times(1000), marks=pytest.mark.stress)])
def test_killed_at_any_moment(place, folder, kills):
    """A client or a device that is killed while something is kept or restored: the next start always works, and what
    is there afterwards is right. Every other round begins with an empty folder.
    """
    arguments = [sys.executable, "-c", _COMPILE, "reference", str(folder)]
    random = np.random.default_rng(kills)
    took = 0.05
    for number in range(kills):
        if number % 2:
            Folder(folder).clear()
        with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            process.stdin.write("go\n")
            process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(took * random.random())
            if number % 3:
                process.kill()
            else:
                place.clear()
            process.wait(30)
        begin = time.monotonic()
        with driver.compile(adder(), ["reference"], cache_dir=folder) as model:
            np.testing.assert_array_equal(model.run(X)[0], X + 1)
            assert outcomes(model)[0] in {"saved", "restored"}
        took = max(took, time.monotonic() - begin)


def test_a_device_that_is_started_again_takes_it_from_the_cache(compiled, place, folder):
    """A burst that recovers does not compile."""
    with compiled(adder()).burst(recover=True) as burst:
        burst.run(X)
        place.clear()
        np.testing.assert_array_equal(burst.run(X).outputs[0], X + 1)
        assert burst.stats()["recoveries"] == 1
    (entry,) = entries(folder)
    assert entry.hits == 1


def test_a_recipe_names_the_cache(compiled):
    """A model that is unpickled is restored."""
    import pickle

    with pickle.loads(pickle.dumps(compiled(adder()))) as again:
        assert outcomes(again) == ["restored"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dir": "/nonexistent-\0"}, "cache_dir"),
        ({"cache_token": b"short"}, "cache_token=b'short'"),
        ({"cache_token": "t" * 32}, "cache_token"),
        ({"cache_dir": None, "cache_token": bytes(32)}, "cache_dir"),
        ({"cache_dir": 7}, "cache_dir"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(compiled, options, message):
    """With their value, before anything is connected."""
    with pytest.raises(ValueError, match=message):
        compiled(adder(), **options)


def test_verify_asks_the_device(compiled, folder):
    """Each entry is good, or refused with the device's reason."""
    compiled(adder())
    assert {verdict.state for verdict in verify(Folder(folder))} == {"good"}
    (entry,) = entries(folder)
    with Folder(folder).entry(bytes.fromhex(entry.token)).opened(Counts(0, 1)) as files:
        os.ftruncate(files.data[0], 1)
    (bad,) = [verdict for verdict in verify(Folder(folder)) if verdict.state != "good"]
    assert (bad.state, bad.entry.device) == ("refused", "reference")
    assert "1" in bad.reason
