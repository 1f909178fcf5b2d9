"""Checks the GPUs of this machine: whether NVIDIA's driver is there, and what its management library (NVML) tells."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from driver.finding import Finding, size
from driver.monitor import GpuReader

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER = Path("/proc/driver/nvidia/version")


def gpus() -> Iterator[Finding]:
    """Return each GPU by name; or why there is none, which is no fault unless the driver is there."""
    reader = GpuReader()
    found = reader.read()
    for gpu in found:
        memory = "unknown" if gpu.memory_total is None else size(gpu.memory_total)
        words = f"{gpu.name or 'unknown'}, {memory}, driver {reader.driver_version or 'unknown'}"
        yield Finding(f"GPU {gpu.index}", "ok", words)
    if not found and DRIVER.exists():
        words = reader.absence or "NVIDIA's driver is there, but it shows no GPU"
        why = "`burst top` shows neither GPU memory nor utilisation"
        remedy = "compare with nvidia-smi; in a container, pass the GPU in: docker run --gpus all"
        yield Finding("NVIDIA GPUs", "note", words, why, remedy=remedy)
    elif not found:
        yield Finding("NVIDIA GPUs", "ok", "no NVIDIA driver; in a container, pass the GPU in: docker run --gpus all")
