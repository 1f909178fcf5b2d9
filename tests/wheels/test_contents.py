"""What `make wheels` writes: small, the same each time, for every glibc from 2.28 on, with a list of what is inside."""

import email
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PROCESSORS = {"x86_64": 62, "aarch64": 183}  # and what their ELF files say


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_wheel_states_its_processor_and_its_glibc(wheels, processor):
    """One abi3 wheel of under 3 MB, named and tagged for manylinux_2_28; all four extensions are for that processor."""
    (wheel,) = wheels.glob(f"burst_engine-*-cp311-abi3-manylinux_2_28_{processor}.whl")
    assert wheel.stat().st_size < 3_000_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (tags,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL"))
        machines = {name: int.from_bytes(archive.read(name)[18:20], "little") for name in names if name.endswith(".so")}
    assert f"Tag: cp311-abi3-manylinux_2_28_{processor}\n" in tags
    assert set(machines) == {f"{package}/{name}.abi3.so" for package in ("fmq", "burst") for name in ("_core", "_hot")}
    assert set(machines.values()) == {PROCESSORS[processor]}


def test_a_wheel_that_needs_a_later_glibc_is_refused(wheels, tmp_path):
    """The same files under a name that promises glibc 2.12: the check that ends each build says what they need."""
    needed = r"needs manylinux_2_(17|2[0-8])_x86_64"
    (wheel,) = wheels.glob("*x86_64.whl")
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import wheels; wheels.GLIBC = (2, 12);"
        "wheels.check(pathlib.Path(sys.argv[2]), 'x86_64')"
    )
    command = [sys.executable, "-c", program, ROOT / "csrc", wheel]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert re.search(needed, done.stderr)


def test_two_builds_are_the_same_bytes(wheels, make_wheels, tmp_path):
    """A second build, from another folder, has the same sums."""
    again = make_wheels(tmp_path / "dist")
    assert (again / "SHA256SUMS").read_text() == (wheels / "SHA256SUMS").read_text()


def test_no_path_of_the_machine_is_inside(wheels):
    """Neither the folder of the build nor this repository's is named in an extension."""
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.endswith(".so"):
                    assert not re.findall(rb"/tmp/\w+|/home/\w+|" + re.escape(bytes(ROOT)), archive.read(name)), name


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_list_of_contents_is_valid_and_whole(wheels, processor):
    """A CycloneDX document that its own validator accepts: it names each requirement of the wheel's metadata, and cffi,
    whose code is compiled in, with its version."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    (wheel,) = wheels.glob(f"*{processor}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (listed,) = (name for name in archive.namelist() if ".dist-info/sboms/" in name)
        text = archive.read(listed).decode()
        (about,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    required = [line for line in email.message_from_string(about).get_all("Requires-Dist") if "extra ==" not in line]
    names = {re.match(r"[\w-]+", line)[0].replace("_", "-") for line in required}
    document = json.loads(text)
    named = {part["purl"].removeprefix("pkg:pypi/").partition("@")[0] for part in document["components"]}
    assert named == names
    assert any(part["name"] == "cffi" and part.get("version") for part in document["components"])
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert document["metadata"]["component"]["version"] == version


def test_the_sdist_builds_without_a_network(wheels, tmp_path):
    """In a network namespace that has no network, pip makes a wheel from the sdist with the packages that are
    installed: the system's compiler, no isolation, no index."""
    if not shutil.which("unshare"):
        pytest.skip("no 'unshare'; install it (Debian: apt install util-linux)")
    (sdist,) = wheels.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    command = ["unshare", "--map-root-user", "--net", *pip, "--wheel-dir", tmp_path, sdist]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("burst_engine-*-cp311-abi3-linux_*.whl"))
