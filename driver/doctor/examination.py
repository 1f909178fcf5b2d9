"""All checks, in the order of the report."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from driver.doctor import (
    engine_uids,
    graphics_adapters,
    import_names,
    installation,
    latency_hint,
    machine,
    nvidia_gpus,
    running,
)
from driver.finding import Finding, examined
from driver.gateway import InstalledGateway, installed_gateways

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "installation": installation.packages,
    "names of packages": import_names.names,
    "kernel": machine.kernel,
    "system calls": machine.tried,
    "container": machine.container,
    "uids for engines": engine_uids.ways,
    "processors": machine.processors,
    "open bursts": latency_hint.hint,
    "memory": machine.memory,
    "shared memory": machine.shared_memory,
    "huge pages": machine.huge_pages,
    "limits of the process": machine.limits_of_the_process,
    "limits of clients": machine.limits_of_clients,
    "runtime directory": machine.runtime,
    "start locks": machine.start_locks,
    "folders": machine.kept,
    "devices": installation.installed,
    "running devices": running.devices,
    "graphics adapters": graphics_adapters.adapters,
    "GPUs": nvidia_gpus.gpus,
}


def examine(*, start: bool = False) -> list[Finding]:
    """Run all checks, those of gateways last; with `start`, also start every installed device. Never raise."""
    checks = CHECKS | {str(each): partial(_of_gateway, each) for each in installed_gateways()}
    checks |= {"starting devices": installation.started} if start else {}
    return [finding for name, check in checks.items() for finding in examined(name, check)]


def _of_gateway(found: InstalledGateway) -> Iterator[Finding]:
    """Yield what a gateway's own checks find, or that it cannot be loaded."""
    if found.gateway is None:
        why, remedy = "`burst serve` has no options of it", f"update {found.distribution}, or pip uninstall it"
        yield Finding(str(found), "warning", f"cannot be loaded: {found.fault}", why, remedy=found.remedy or remedy)
        return
    for name, check in found.gateway.checks().items():
        yield from examined(name, check)
