"""device: what a device reports about itself, and that it serves many clients and threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from driver.client.device import connect
from driver.devices.library.description import is_library
from driver.vts.burst import plain
from driver.vts.kit import Test, check
from driver.vts.operations import prepared
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.vts.target import Target

_TYPES = ("OTHER", "CPU", "GPU", "ACCELERATOR")
_THREADS, _RUNS = 4, 8


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    yield from (
        Test("device/status", status),
        Test("device/name", name),
        Test("device/version", version),
        Test("device/type", type_),
        Test("device/second_client", second_client),
        Test("device/concurrent_executions", concurrent_executions),
        Test("device/concurrent_preparations", concurrent_preparations),
    )
    for which in SAMPLES:
        yield Test(f"device/supported_operations/{which}", partial(supported_operations, which))


def status(target: Target) -> None:
    """The device answers."""
    target.device.call("free", 0, timeout=target.patience)


def name(target: Target) -> None:
    """The device reports the name that it is installed under. A class or a library under test may have any name."""
    found = target.device.name
    check(found, "the device's name is empty")
    is_file = ":" in target.name or is_library(target.name)
    check(is_file or found == target.name, f"installed as {target.name!r}, the device is named {found!r:.60}")


def version(target: Target) -> None:
    """The device has a version, which identifies this build of the driver."""
    check(target.device.version.strip(), "the device's version is empty")


def type_(target: Target) -> None:
    """The device has a type of the HAL."""
    found = target.device.type
    check(found in _TYPES, f"the device's type is {found!r:.40}, not one of {', '.join(_TYPES)}")


def supported_operations(which: str, target: Target) -> None:
    """The device answers for each operation of the main subgraph, and the same every time."""
    model = sample(which).model
    first = target.supported(model)
    count = len(model.main.operations)
    check(len(first) == count, f"supported_operations returns {len(first)} answers for {count} operations")
    check(first == target.supported(model), "supported_operations returns different answers to the same question")


def second_client(target: Target) -> None:
    """Another client of the same process does not disturb the first."""
    case = sample("add")
    with prepared(case, target) as model:
        expected = plain(model, case, target)
        with connect(target.name) as other:
            check(other.service_pid == target.device.service_pid, "a second client gets another device process")
        check(plain(model, case, target) == expected, "after a second client left, the result differs")


def concurrent_executions(target: Target) -> None:
    """Several threads execute one prepared model, and each gets its own result."""
    cases = [sample("convolution", seed) for seed in range(_THREADS)]
    with prepared(cases[0], target) as model, ThreadPoolExecutor(_THREADS) as threads:
        expected = [plain(model, case, target) for case in cases]

        def work(number: int) -> list[list[bytes]]:
            runs = (model.run(*cases[number].feeds, timeout=target.patience) for _ in range(_RUNS))
            return [[output.tobytes() for output in outputs] for outputs in runs]

        for number, found in enumerate(threads.map(work, range(_THREADS))):
            check(
                found == [expected[number]] * _RUNS,
                f"thread {number} of {_THREADS} gets another result than a single thread",
            )


def concurrent_preparations(target: Target) -> None:
    """Several threads prepare models and execute them, each its own."""
    cases = [sample("chain", seed) for seed in range(_THREADS)]
    with prepared(cases[0], target) as model:
        expected = [plain(model, case, target) for case in cases]

    def work(number: int) -> list[bytes]:
        with prepared(cases[number], target) as model:
            return [output.tobytes() for output in model.run(*cases[number].feeds, timeout=target.patience)]

    with ThreadPoolExecutor(_THREADS) as threads:
        for number, found in enumerate(threads.map(work, range(_THREADS))):
            check(found == expected[number], f"thread {number} of {_THREADS} gets another result than a single thread")
