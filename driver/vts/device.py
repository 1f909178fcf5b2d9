"""device: what a device reports about itself, and that it serves many clients and threads at once."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, get_args

from burst import ErrorStatus
from driver.client.device import connect
from driver.client.served_sockets import is_path
from driver.devices import device_class
from driver.devices.library.description import is_library
from driver.interface import Needs, State
from driver.vts.burst import plain
from driver.vts.kit import Test, check, skip
from driver.vts.operations import prepared
from driver.vts.request import valid
from driver.vts.samples import SAMPLES, sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from driver.interface import Capabilities
    from driver.vts.target import Target

_PATH, _CALL = re.compile(r"(~?/).*"), re.compile(r"[a-z0-9_]+")
_TYPES = ("OTHER", "CPU", "GPU", "ACCELERATOR")
_THREADS, _RUNS = 4, 8


def tests() -> Iterator[Test]:
    """All tests of this file, in any scope: they take milliseconds."""
    yield from (
        Test("device/status", status),
        Test("device/name", name),
        Test("device/version", version),
        Test("device/type", type_),
        Test("device/state", state),
        Test("device/needs", needs),
        Test("device/capabilities/well_formed", capabilities),
        Test("device/capabilities/complete", complete_capabilities),
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


def state(target: Target) -> None:
    """The device says one of the HAL's four states, and takes work while it says that it does."""
    found = target.device.status()
    check(found.state in get_args(State), f"the state is {found.state!r:.40}, not one of {', '.join(get_args(State))}")
    check(found.takes_work, f"the device takes no work, so it cannot be tested: {found}")
    with prepared(sample("add"), target) as model:
        status = model.execute(valid("add"), timeout=target.patience).status
        check(status != ErrorStatus.DEVICE_UNAVAILABLE, f"the state is {found}, but an execution gets {status.name}")


def needs(target: Target) -> None:
    """The driver declares needs that are paths and names of system calls that a sandbox can use."""
    if is_path(target.device.address):
        skip("a served device: its driver is not installed here")
    found = device_class(target.device.address).needs
    check(isinstance(found, Needs), f"needs is {found!r:.80}, not driver.interface.Needs")
    fields = found._asdict()
    is_one = fields.pop("one_engine")
    check(is_one is None or isinstance(is_one, bool), f"needs.one_engine is {is_one!r:.80}, not True, False or None")
    for field, names in fields.items():
        check(isinstance(names, tuple), f"needs.{field} is {names!r:.80}, not a tuple of texts")
        for one in names:
            is_right = _CALL.fullmatch if field == "system_calls" else _PATH.match
            form = "the name of a system call" if field == "system_calls" else 'an absolute path, or one from "~/"'
            check(isinstance(one, str) and is_right(one), f"needs.{field} has {one!r:.80}, not {form}")


def capabilities(target: Target) -> None:
    """The driver's statements about its speed make sense, each time."""
    for _ in range(2):
        _stated(target)


def _stated(target: Target) -> Capabilities:
    found = target.device.stated_capabilities()
    return found if found is not None else skip("the driver states no capabilities; Burst measures them")


def complete_capabilities(target: Target) -> None:
    """A driver that states its speed states it for each type that it supports: others would be placed nowhere."""
    found, model = _stated(target), sample("add").model
    if all(target.supported(model)):
        kind = model.main.operands[model.main.inputs[0]].type.name
        known = ", ".join(found.operands) or "no type"
        check(kind in found.operands, f"it supports ADD of {kind}, and states capabilities for {known} alone")


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
