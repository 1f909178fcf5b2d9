"""burst_device.h: what it declares is what Burst reads, in C and in C++."""

import re
import shutil
import subprocess
import sys

import pytest
from c_drivers import HEADERS, SOURCES, STRICT, compiled

from driver.devices.library.table import ffi
from driver.nn import OPERATIONS, OperandType

COMPILERS = [("cc", "-std=c99"), ("cc", "-std=c11"), ("c++", "-x", "c++", "-std=c++17")]


def structs():
    """The structs with fields that the header declares."""
    names, _, _ = ffi.list_types()
    return [name for name in names if ffi.typeof(name).kind == "struct" and ffi.typeof(name).fields]


def test_layouts_are_those_of_the_compiler(tmp_path):
    """The size of each struct, and the offset of each field, are the same for cffi and for the C compiler."""
    said = {name: ffi.sizeof(name) for name in structs()}
    said |= {f"{name}.{field}": ffi.offsetof(name, field) for name in structs() for field, _ in ffi.typeof(name).fields}
    how = {what: f"offsetof({what.replace('.', ', ')})" if "." in what else f"sizeof({what})" for what in said}
    lines = [f'printf("{what} %zu\\n", {expression});' for what, expression in how.items()]
    program = tmp_path / "layout.c"
    program.write_text(
        '#include <stddef.h>\n#include <stdio.h>\n#include "burst_device.h"\nint main(void) {\n'
        + "\n".join(lines)
        + "}\n"
    )
    subprocess.run(["cc", *STRICT, program, "-o", tmp_path / "layout"], check=True)
    out = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    found = dict(line.split() for line in out.splitlines())
    assert {what: int(number) for what, number in found.items()} == said
    assert len(said) > 150


def test_numbers_are_those_of_the_hal():
    """burst_operations.h names each operand type and each operation, with its number."""
    text = (HEADERS / "burst_operations.h").read_text()
    said = {name: int(number) for name, number in re.findall(r"BURST_(\w+) = (\d+)", text)}
    operations = {f"OPERATION_{name}": kind.code for name, kind in OPERATIONS.items()}
    assert {name: number for name, number in said.items() if name in operations} == operations
    types = {name: number for name, number in said.items() if name not in operations}
    assert sorted(types.values()) == sorted(OperandType)
    assert {name: OperandType[name] for name in types if name.startswith("TENSOR_")}.items() <= types.items()


@pytest.mark.integration
@pytest.mark.parametrize("compiler", COMPILERS, ids=" ".join)
def test_compiles_without_a_warning(compiler, tmp_path):
    """The header and the small library compile as C99, C11 and C++17 with all warnings as errors; so does a driver, and
    in C++ its function has C's name."""
    compiled(tmp_path / "libtoy.so", "toy.c", compiler=compiler)
    out = subprocess.run(
        ["nm", "-D", "--defined-only", tmp_path / "libtoy.so"], check=True, capture_output=True, text=True
    )
    assert "burst_device_get" in out.stdout.split()


def test_sizes_of_operands(tmp_path):
    """`burst_operand_bytes` is 0 for every type whose dimensions are not known, and for too many elements."""
    program = tmp_path / "sizes.c"
    program.write_text("""
        #include "burst_device.h"
        static uint64_t bytes(int32_t type, uint32_t rank, const uint32_t *dimensions) {
            burst_operand operand = {0};
            operand.type = type, operand.rank = rank, operand.dimensions = dimensions;
            return burst_operand_bytes(&operand);
        }
        int main(void) {
            const uint32_t known[] = {2, 3}, open[] = {2, 0}, many[] = {1u << 31, 1u << 31, 4};
            for (int32_t type = 3; type < 15; type++) {
                if (type == BURST_SCALAR_BOOL || type == BURST_SCALAR_FLOAT16) continue;
                if (bytes(type, 2, known) != 6 * burst_element_bytes(type)) return 1;
                if (bytes(type, 2, open) || bytes(type, 0, open) || bytes(type, 3, many)) return 2;
            }
            return bytes(BURST_SCALAR_INT32, 0, open) != 4;
        }
    """)
    subprocess.run(["cc", *STRICT, program, HEADERS / "burst_device.c", "-o", tmp_path / "sizes"], check=True)
    assert subprocess.run([tmp_path / "sizes"], check=False).returncode == 0


@pytest.mark.integration
def test_the_command_prints_the_folder():
    """`--include` and `--cmake` print the folder with the header, the source and the file for CMake."""
    for option, file in (("--include", "burst_device.h"), ("--cmake", "BurstDeviceConfig.cmake")):
        command = [sys.executable, "-m", "driver.devices.library", option]
        folder = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        assert folder == str(HEADERS)
        assert (HEADERS / file).exists()


@pytest.mark.integration
@pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake")
def test_cmake_builds_a_driver(tmp_path):
    """`find_package(BurstDevice)` is all that a project needs to build one."""
    (tmp_path / "CMakeLists.txt").write_text(f"""
        cmake_minimum_required(VERSION 3.18)
        project(toy LANGUAGES C)
        find_package(BurstDevice REQUIRED)
        add_library(toy MODULE {SOURCES / "toy.c"})
        target_link_libraries(toy PRIVATE Burst::Device m)
    """)
    run = {"capture_output": True, "cwd": tmp_path}
    subprocess.run(["cmake", "-S", ".", "-B", "out", f"-DBurstDevice_DIR={HEADERS}"], check=True, **run)
    subprocess.run(["cmake", "--build", "out"], check=True, **run)
    assert (tmp_path / "out/libtoy.so").exists()
