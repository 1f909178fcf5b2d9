"""All checks, in the order of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driver.doctor import (
    camera_nodes,
    frigate_socket,
    graphics_adapters,
    gstreamer_loader,
    import_names,
    installation,
    machine,
    nvidia_gpus,
    running,
    satellite_doors,
)
from driver.doctor.finding import examined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from driver.doctor.finding import Finding

CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "installation": installation.packages,
    "names of packages": import_names.names,
    "kernel": machine.kernel,
    "system calls": machine.tried,
    "container": machine.container,
    "processors": machine.processors,
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
    "wake words": satellite_doors.wake_words,
    "GStreamer": gstreamer_loader.element,
    "cameras": camera_nodes.nodes,
    "Frigate": frigate_socket.frigate,
    "GPUs": nvidia_gpus.gpus,
}


def examine(*, start: bool = False) -> list[Finding]:
    """Runs all checks; with `start`, also starts every installed device. Never raises."""
    checks = CHECKS | ({"starting devices": installation.started} if start else {})
    return [finding for name, check in checks.items() for finding in examined(name, check)]
