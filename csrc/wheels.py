"""`make wheels`: builds an sdist and, from it, one wheel per processor with the C compiler in the package `ziglang`.

It needs no Docker: Zig brings the headers and the symbol versions of every glibc, so that the wheels run on the glibc
that their name states and on every later one. Two runs on the same commit write the same bytes: the files bear the
commit's time, and no path of the machine gets in.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = (2, 28)
PROCESSORS = ("x86_64", "aarch64")
MOST_BYTES = 3_000_000

TOOLCHAIN = """\
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR {processor})
set(CMAKE_C_COMPILER {tools}/cc)
set(CMAKE_AR {tools}/ar)
set(CMAKE_RANLIB {tools}/ranlib)
set(CMAKE_C_COMPILER_AR {tools}/ar)
set(CMAKE_C_COMPILER_RANLIB {tools}/ranlib)
set(CMAKE_C_FLAGS_INIT "-ffile-prefix-map={source}=. -ffile-prefix-map={tools}=.")
"""


def epoch() -> str:
    """Return the time of all files inside: the environment's, or the commit's, or 1980, where zip files begin."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    shown = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    return shown.stdout.strip() or "315532800"


def build(kind: str, source: Path, out: Path, *options: str, **environment: str) -> None:
    """Run `python -m build` with the packages that this Python has: nothing is fetched."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, *options, source]
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nmake wheels: the {kind} was not built: see above")


def make_tools(tools: Path, processor: str, source: Path) -> Path:
    """Programs that CMake takes for a compiler, and its description of them."""
    tools.mkdir()
    target = f"-target {processor}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    for tool, options in {"cc": target, "ar": "", "ranlib": ""}.items():
        program = tools / tool
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {tool} {options} "$@"\n')
        program.chmod(0o755)
    description = tools / "toolchain.cmake"
    description.write_text(TOOLCHAIN.format(processor=processor, tools=tools, source=source))
    return description


def build_wheel(source: Path, out: Path, processor: str) -> Path:
    """Return a wheel for that processor, whose name states the oldest glibc that it runs on."""
    platform = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{processor}"
    tools = source.parent / processor
    arguments = f"cmake.args=-DCMAKE_TOOLCHAIN_FILE={make_tools(tools, processor, source)}"
    build(
        *("wheel", source, out, "-C", arguments, "-C", f"build-dir={tools}/build", "-C", "install.strip=true"),
        _PYTHON_HOST_PLATFORM=platform,
    )
    (wheel,) = out.glob(f"*{platform}.whl")
    return wheel


def check(wheel: Path, processor: str) -> None:
    """End the program if the wheel is too large, or needs more of a system than its name states."""
    if (nbytes := wheel.stat().st_size) > MOST_BYTES:
        sys.exit(f"make wheels: {wheel.name} has {nbytes:,} bytes, and may have {MOST_BYTES:,}")
    command = [sys.executable, "-m", "auditwheel", "show", "--json", wheel]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(shown.stdout)["overall_tag"]
    glibc = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{processor}", found)
    if not glibc or tuple(map(int, glibc.groups())) > GLIBC:
        sys.exit(f"make wheels: auditwheel finds that {wheel.name} needs {found}: `auditwheel show` says which symbols")


def main() -> None:
    """Build, check, and write SHA256SUMS beside the wheels."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, default=ROOT / "dist", help="folder, which is emptied first")
    arguments.add_argument("--processor", choices=PROCESSORS, action="append", help="default: all")
    given = arguments.parse_args()
    out = given.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    os.environ["SOURCE_DATE_EPOCH"] = epoch()
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as scratch:
        build("sdist", ROOT, out)
        (sdist,) = out.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(scratch, filter="data")
        (source,) = Path(scratch).iterdir()
        for processor in given.processor or PROCESSORS:
            check(build_wheel(source, out, processor), processor)
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *out.iterdir()], check=True)
    files = sorted(out.iterdir())
    sums = "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    for file in files:
        print(f"{file.stat().st_size:>10,} bytes  {file.name}")
    (out / "SHA256SUMS").write_text(sums)


if __name__ == "__main__":
    main()
