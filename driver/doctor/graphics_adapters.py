"""Checks what `onnxruntime-webgpu` runs on: nodes of GPUs, their drivers for Vulkan, and what adapters these offer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from driver.devices.onnxruntime import vulkan
from driver.devices.onnxruntime.providers import PROVIDERS, ExecutionProvider
from driver.finding import Finding, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICES, SYSTEM = Path("/dev/dri"), Path("/sys/class/drm")
_DEVICE = "onnxruntime-webgpu"
_MAKERS = {"0x1002": "AMD", "0x8086": "Intel", "0x10de": "NVIDIA"}
_DRIVERS = {"NVIDIA": "install NVIDIA's driver with its Vulkan part (Debian: apt install nvidia-driver-libs)"}
_MESA = "install Mesa's drivers (Debian: apt install mesa-vulkan-drivers)"
_LOADER = "install Vulkan's loader (Debian: apt install libvulkan1)"
_SECONDS = 30


def adapters() -> Iterator[Finding]:
    """Return each node of a GPU, and each adapter of Vulkan; or why there is none. Without the provider, nothing."""
    provider = PROVIDERS[_DEVICE]
    if provider.package is None:
        return
    nodes = sorted(DEVICES.glob("renderD*")) if DEVICES.is_dir() else []
    for path in nodes:
        yield _node(path)
    yield from _vulkan(ExecutionProvider(provider, provider.chosen({})), [_maker(path) for path in nodes])


def _maker(path: Path) -> str:
    return _MAKERS.get(text_of(SYSTEM / path.name / "device/vendor"), "another maker")


def _node(path: Path) -> Finding:
    what = f"a GPU of {_maker(path)}"
    if os.access(path, os.R_OK | os.W_OK):
        return Finding(str(path), "ok", what)
    why = f"{_DEVICE} and other programs of this account cannot use {what}"
    return Finding(
        str(path), "warning", "this account may not open it", why, remedy="usermod -aG render ACCOUNT, log in again"
    )


def _vulkan(provider: ExecutionProvider, makers: list[str]) -> Iterator[Finding]:
    remedy = "; ".join(dict.fromkeys(_DRIVERS.get(maker, _MESA) for maker in makers)) or (
        "without a GPU: name a software driver, driver = …, in its configuration; in a container, pass the GPU in: "
        "docker run --device /dev/dri, or --gpus all"
    )
    found, fault = _asked(provider)
    if fault:
        is_loader = vulkan.LOADER in fault
        yield Finding("Vulkan", "warning", fault, f"{_DEVICE} finds no GPU", remedy=_LOADER if is_loader else remedy)
    elif not found:
        yield Finding("Vulkan", "warning", "it has no adapter", f"{_DEVICE} finds no GPU", remedy=remedy)
    for adapter in found:
        yield Finding("Vulkan", "ok", f"{adapter.name}, {adapter.kind}")
    if found and all(adapter.is_software for adapter in found):
        why = "the CPU does the work of a GPU, a thousand times slower"
        if makers:
            words = f"it has software alone, and there is a GPU of {' and of '.join(makers)}: its driver is missing"
            yield Finding("Vulkan", "warning", words, why, remedy=remedy)
        else:
            yield Finding(
                "Vulkan",
                "note",
                "it has software alone",
                why,
                remedy="use it for tests; the device onnxruntime is fast",
            )


def _asked(provider: ExecutionProvider) -> tuple[list[vulkan.Adapter], str]:
    """Ask in a process of its own, in which a driver may crash. Returns the adapters, and what failed."""
    words, environment = [sys.executable, "-P", vulkan.__file__], os.environ | provider.environment()
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"its driver does not answer within {_SECONDS} s"
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return [], f"its driver ended the process that asked it, with {done.returncode}"
    return [vulkan.Adapter(*each) for each in answer.get("adapters", ())], answer.get("fault", "")
