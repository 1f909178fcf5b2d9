"""libburst from Python by ctypes: what `make install` builds, the functions of burst.h, and a model that adds."""

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from ctypes import POINTER, byref, c_float, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOREVER = 2**64 - 1
FLOAT32_TENSOR, INT32 = 3, 1


class Options(ctypes.Structure):
    _fields_ = (
        ("size", c_uint32),
        ("depth", c_uint32),
        ("spin", c_uint64),
        ("recover", c_uint32),
        ("measure", c_uint32),
        ("loop_timeout", c_uint64),
    )


class Execution(ctypes.Structure):
    _fields_ = (
        *((name, c_uint32) for name in ("size", "measure", "recover", "room")),
        *(("shapes", POINTER(c_uint32)), ("loop_timeout", c_uint64)),
    )


class Tensor(ctypes.Structure):
    _fields_ = (
        *(("pool", c_void_p), ("offset", c_uint64), ("length", c_uint64)),
        *(("rank", c_uint32), ("shape", POINTER(c_uint32))),
    )


class Outcome(ctypes.Structure):
    _fields_ = (
        *(("number", c_uint64), ("on_device", c_uint64), ("in_driver", c_uint64)),
        *(("status", c_int32), ("n_shapes", c_uint32)),
    )


COUNTS = ("requests", "results", "timeouts", "revivals", "memories_sent", "in_flight", "total_ns", "asleep_ns")


class Statistics(ctypes.Structure):
    _fields_ = tuple((name, c_uint64) for name in COUNTS)


class FileTensor(ctypes.Structure):
    _fields_ = (("dtype", ctypes.c_char_p), ("rank", c_uint32), ("shape", POINTER(c_uint32)))


def install(folder, *arguments):
    """Runs `make install` into a folder, which it returns."""
    return install_libraries(folder, "LIBRARIES=libburst", *arguments)


def install_libraries(folder, *arguments):
    """Both of them."""
    command = ["make", "--silent", "-j2", "install", f"PREFIX={folder}", f"LIBRARIES_BUILD={folder}/build", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return folder


def declared_functions(header, prefix):
    """The names of the functions that a header declares, sorted."""
    text = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc" / header).read_text(), flags=re.DOTALL)
    return sorted(re.findall(rf"\b({prefix}_\w+)\(", text))


def exported_functions(library, *options):
    """The names of the functions that a library exports, sorted."""
    command = ["nm", *options, "--defined-only", library]
    return sorted(re.findall(r" T (\S+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout))


@contextlib.contextmanager
def own_place(monkeypatch):
    """A runtime directory for a test, where libburst starts devices with this Python."""
    monkeypatch.setenv("BURST_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory(prefix="burst-c-", dir="/tmp") as path:
        monkeypatch.setenv("BURST_RUNTIME_DIR", path)
        yield path


def mapped_pools(process):
    """How many pools a process has mapped."""
    return Path(f"/proc/{process.pid}/maps").read_text().count("memfd:burst-pool")


def load(folder):
    """The shared library; handles are passed as pointers."""
    library = ctypes.CDLL(str(Path(folder) / "lib/libburst.so"))
    library.burst_why.restype = ctypes.c_char_p
    library.burst_now.restype = c_uint64
    return library


def shape(*dimensions):
    return (c_uint32 * len(dimensions))(*dimensions)


def why(library):
    return library.burst_why().decode()


def checked(library, result):
    assert result >= 0, f"{os.strerror(-result)}: {why(library)}"
    assert result == 0, why(library)


def handle_of(library, function, *arguments):
    """What a function makes, as its last argument."""
    made = c_void_p()
    checked(library, getattr(library, function)(*arguments, byref(made)))
    return made


def adder(library, n=4):
    """A finished model: float32[1, n] x + y."""
    model, dimensions = handle_of(library, "burst_builder_new"), shape(1, n)
    zero = c_int32(0)
    operand = [model, FLOAT32_TENSOR, 2, dimensions, c_float(0), 0]
    assert library.burst_builder_operand(*operand) == 0
    assert library.burst_builder_operand(*operand) == 1
    assert library.burst_builder_constant(model, INT32, 0, None, c_float(0), 0, byref(zero), c_size_t(4)) == 2
    assert library.burst_builder_operand(*operand) == 3
    checked(library, library.burst_builder_operation(model, b"ADD", 3, shape(0, 1, 2), 1, shape(3)))
    checked(library, library.burst_builder_finish(model, 2, shape(0, 1), 1, shape(3)))
    return model


class Adder:
    """A burst that adds, with one pool for x, y and the sum."""

    def __init__(self, library, device=b"reference", n=4, **options):
        self.library, self.n = library, n
        self.client = handle_of(library, "burst_connect", device)
        self.model = adder(library, n)
        self.compiled = handle_of(library, "burst_prepare", self.client, self.model, c_uint64(FOREVER))
        given = Options(size=ctypes.sizeof(Options), **options)
        self.controller = handle_of(library, "burst_open", self.compiled, byref(given))
        self.pool, self.values = self.new_pool()
        self.request = self.new_request(self.pool)

    def new_pool(self):
        pool, base = c_void_p(), c_void_p()
        checked(self.library, self.library.burst_pool_new(c_size_t(12 * self.n), byref(pool), byref(base)))
        return pool, (c_float * (3 * self.n)).from_address(base.value)

    def new_request(self, pool):
        x, y, total = [Tensor(pool, 4 * self.n * i, 4 * self.n, 0, None) for i in range(3)]
        return handle_of(
            self.library, "burst_request_new", self.controller, 2, (Tensor * 2)(x, y), 1, (Tensor * 1)(total)
        )

    def run(self, deadline=FOREVER, request=None):
        """The result of burst_run."""
        return self.library.burst_run(self.controller, request or self.request, c_uint64(deadline), None)

    def submit(self, request=None, deadline=FOREVER):
        number = c_uint64()
        result = self.library.burst_submit(self.controller, request or self.request, c_uint64(deadline), byref(number))
        return result, number.value

    def wait(self, deadline=FOREVER):
        outcome = Outcome()
        return self.library.burst_await(self.controller, c_uint64(deadline), byref(outcome)), outcome

    def adds(self):
        """Whether a sum comes out as it should."""
        self.values[:] = [*range(self.n), *[10.0] * self.n, *[0.0] * self.n]
        result = self.run()
        return result == 0 and self.values[2 * self.n :] == [i + 10.0 for i in range(self.n)]

    def count(self):
        found = Statistics()
        checked(self.library, self.library.burst_count(self.controller, byref(found)))
        return {name: getattr(found, name) for name in COUNTS}

    def close(self):
        """In the order of their making, which is the wrong way round, and may be."""
        library = self.library
        checked(library, library.burst_disconnect(self.client))
        checked(library, library.burst_builder_free(self.model))
        checked(library, library.burst_compiled_free(self.compiled))
        checked(library, library.burst_close(self.controller))
        checked(library, library.burst_pool_free(self.pool))
        checked(library, library.burst_request_free(self.request))
