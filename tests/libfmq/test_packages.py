"""What the libraries are installed as: CMake packages, a stable ABI, and Debian packages."""

import os
import platform
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from libburst_by_ctypes import ROOT

pytestmark = pytest.mark.integration
NAMES = ["libburst", "libfmq"]
CSRC = ROOT / "csrc"
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
MAJOR, MINOR, _ = map(int, VERSION.split("."))


def run(*command, cwd=None, **more):
    """What it prints; a failure shows all."""
    environment = os.environ | {key: str(value) for key, value in more.items()}
    how = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=cwd, env=environment, check=False, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_of_sources(folder):
    """csrc without anything but what the libraries are built of."""
    return Path(shutil.copytree(CSRC, folder / "csrc", ignore=shutil.ignore_patterns("python", "model")))


# ---- CMake -----------------------------------------------------------------------------------------------------------

PROJECT = f"""
cmake_minimum_required(VERSION 3.18)
project(user LANGUAGES C CXX)
set(CMAKE_CXX_STANDARD 17)
find_package(burst {MAJOR}.{MINOR} REQUIRED)
find_package(burst)
find_package(fmq {VERSION} EXACT REQUIRED)
find_package(fmq {MAJOR}.{MINOR + 1} QUIET)
if(fmq_FOUND)
  message(FATAL_ERROR "version {VERSION} says that it is a later one")
endif()
foreach(kind shared static)
  add_executable(${{kind}} program.cpp)
endforeach()
target_link_libraries(shared PRIVATE burst::burst fmq::fmq)
target_link_libraries(static PRIVATE burst::static fmq::static)
add_executable(in_c program.c)
target_link_libraries(in_c PRIVATE fmq::static)
"""
CPP = """
#include <burst.hpp>
#include <fmq.hpp>
#include <cstdio>
int main() {
    fmq::queue<int> queue(4);
    queue.writer().write(1);
    burst::pool pool(32);
    std::puts(burst_now() <= fmq_now() && pool.view<float>().size() == 8 ? "both" : "?");
}
"""
C = """
#include <fmq.h>
#include <stdio.h>
int main(void) { return puts(fmq_queue_close(NULL) < 0 ? fmq_queue_why() : "?") < 0; }
"""


def test_a_project_of_cmake(prefix, tmp_path):
    """Finds both, of the versions that it asks for, links them shared and static in one program, and runs."""
    for name, text in (("CMakeLists.txt", PROJECT), ("program.cpp", CPP), ("program.c", C)):
        (tmp_path / name).write_text(text)
    run("cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", cwd=tmp_path)
    run("cmake", "--build", "build", "-j2", cwd=tmp_path)
    assert run("build/shared", cwd=tmp_path) == run("build/static", cwd=tmp_path) == "both\n"
    assert run("build/in_c", cwd=tmp_path) == "(nil) is no queue\n"
    assert "libfmq.so.0" in run("ldd", "build/shared", cwd=tmp_path)
    assert "libfmq" not in run("ldd", "build/static", cwd=tmp_path)


def test_one_library_is_installed_alone(tmp_path):
    """libfmq without libburst, and what its installation needs lies where it says: one line for each file."""
    printed = run(
        "make",
        "--no-print-directory",
        "-j2",
        "install",
        "LIBRARIES=libfmq",
        f"PREFIX={tmp_path}",
        f"LIBRARIES_BUILD={tmp_path}/b",
        cwd=ROOT,
    )
    told = [
        line.removeprefix(f"installed {tmp_path}/") for line in printed.splitlines() if line.startswith("installed ")
    ]
    assert not re.search(r"^(install|make|sed)\b", printed, re.MULTILINE)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir())
    assert (
        sorted(told)
        == [path for path in found if not path.startswith("b/")]
        == [
            *(
                "include/fmq.h",
                "include/fmq.hpp",
                "lib/cmake/fmq/fmq-config-version.cmake",
                "lib/cmake/fmq/fmq-config.cmake",
            ),
            *("lib/libfmq.a", "lib/libfmq.so", "lib/libfmq.so.0", "lib/pkgconfig/libfmq.pc"),
        ]
    )


# ---- the ABI ---------------------------------------------------------------------------------------------------------


def abi_changes(stored, library):
    """What a program that was linked with the library of `stored` would trip over; "" if nothing."""
    command = ["abidiff", "--no-added-syms", stored, library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode == 0) == (not done.stdout), done.stderr
    assert not done.returncode & 3, done.stderr  # it could not compare
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the stored text is of x86-64")
@pytest.mark.parametrize("name", NAMES)
def test_the_abi_is_the_stored_one(prefix, name):
    """No function has gone, and no struct or argument has changed, since `make abi` wrote it down."""
    changes = abi_changes(CSRC / name / f"{name}.abi", prefix / f"lib/{name}.so")
    assert not changes, f"{changes}\nIf that is meant: make abi, and commit csrc/{name}/{name}.abi"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the stored text is of x86-64")
@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        (" fmq_queue_lost;", "", "fmq_queue_lost"),
        ("uint32_t element_bytes;\n    int32_t flavour;", "int32_t flavour;\n    uint32_t element_bytes;", "flavour"),
        ("fmq_queue_spin(fmq_queue_end *end, uint64_t ns)", "fmq_queue_spin(fmq_queue_end *end, uint32_t ns)", "spin"),
    ],
    ids=["a symbol less", "a struct in another order", "another argument"],
)
def test_a_changed_abi_is_seen(tmp_path, old, new, seen):
    """A function less, a struct in another order, and another type of an argument are each told by name."""
    folder = copy_of_sources(tmp_path) / "libfmq"
    texts = {path: path.read_text() for path in folder.iterdir() if path.suffix in {".c", ".h", ".map"}}
    assert any(old in text for text in texts.values())
    for path, text in texts.items():
        path.write_text(text.replace(old, new))
    run("make", "--silent", "-j2", f"BUILD={tmp_path}/b", "CFLAGS=-O0 -g", f"{tmp_path}/b/libfmq.so.0", cwd=folder)
    assert seen in abi_changes(CSRC / "libfmq/libfmq.abi", tmp_path / "b/libfmq.so.0")


# ---- Debian ----------------------------------------------------------------------------------------------------------


def test_debian_packages(tmp_path):
    """dpkg-buildpackage makes one for each library, and one to build with, which suffice to compile a program."""
    sources = copy_of_sources(tmp_path)
    run(
        "dpkg-buildpackage",
        "--build=binary",
        "--unsigned-changes",
        "-j2",
        cwd=sources,
        DEB_BUILD_OPTIONS="nostrip noautodbgsym",
    )
    built = {path.name.split("_")[0]: path for path in tmp_path.glob("*.deb")}
    assert sorted(built) == ["libburst-dev", "libburst0", "libfmq0"]
    for path in built.values():
        run("dpkg-deb", "--extract", path, tmp_path / "root")
    fields = {name: run("dpkg-deb", "--field", path) for name, path in built.items()}
    assert re.search(r"Depends:.*libc6", fields["libburst0"])
    assert re.search(r"Depends: .*libburst0 \(= .*libfmq0 \(= ", fields["libburst-dev"])
    triplet = run("dpkg-architecture", "-qDEB_HOST_MULTIARCH").strip()
    libraries = tmp_path / f"root/usr/lib/{triplet}"
    (tmp_path / "program.cpp").write_text(CPP)
    where = {"PKG_CONFIG_PATH": libraries / "pkgconfig", "PKG_CONFIG_SYSROOT_DIR": tmp_path / "root"}
    all_flags = {"PKG_CONFIG_ALLOW_SYSTEM_CFLAGS": 1, "PKG_CONFIG_ALLOW_SYSTEM_LIBS": 1}
    flags = run("pkg-config", "--cflags", "--libs", "libburst", "libfmq", **where, **all_flags)
    run("c++", "-std=c++17", "program.cpp", *flags.split(), "-o", "program", cwd=tmp_path)
    assert run("./program", cwd=tmp_path, LD_LIBRARY_PATH=libraries) == "both\n"
