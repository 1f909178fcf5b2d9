"""The GPUs of this machine, as NVIDIA's management library (NVML) shows them: their memory and their utilisation.

It takes the module of `nvidia-ml-py` and the library of NVIDIA's driver. Where one is missing there are no figures, and
no error. NVML is loaded once in a process and never shut down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from burst_engine.names import install_command
from driver.monitor.figures import GpuFigures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_T = TypeVar("_T")


class GpuReader:
    """Reads the figures of all GPUs. `absence` says why there are none; "" if NVML is there."""

    def __init__(self) -> None:
        self.absence, self._nvml = "", None
        try:
            import pynvml
        except ImportError:
            self.absence = f"the module pynvml is not installed: {install_command('nvidia')}"
            return
        self._error: type[Exception] = pynvml.NVMLError
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.absence = f"NVML says: {error}"
            return
        self._nvml = pynvml

    @property
    def driver_version(self) -> str:
        """The version of NVIDIA's driver; "" if it is not known."""
        return self._asked(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())) or ""

    def read(self) -> list[GpuFigures]:
        """Return the current figures of each GPU. A figure that a GPU does not tell is None."""
        count = self._asked(lambda nvml: int(nvml.nvmlDeviceGetCount())) or 0
        return [self._gpu(index) for index in range(count)]

    def _gpu(self, index: int) -> GpuFigures:
        gpu = self._asked(lambda nvml: nvml.nvmlDeviceGetHandleByIndex(index))
        if gpu is None:
            return GpuFigures(index, "")
        memory = self._asked(lambda nvml: nvml.nvmlDeviceGetMemoryInfo(gpu))
        running = self._asked(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
        return GpuFigures(
            index=index,
            name=self._asked(lambda nvml: str(nvml.nvmlDeviceGetName(gpu))) or "",
            memory_used=int(memory.used) if memory else None,
            memory_total=int(memory.total) if memory else None,
            utilisation=self._asked(lambda nvml: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            memory_of={int(one.pid): int(one.usedGpuMemory or 0) for one in running or ()},
        )

    def _asked(self, question: Callable[[Any], _T]) -> _T | None:
        """Return what it says; None: NVML is not there, or this GPU, or this version of the library, does not tell."""
        if self._nvml is None:
            return None
        try:
            return question(self._nvml)
        except (self._error, UnicodeDecodeError):
            return None


def gpu_memory_of(gpus: Iterable[GpuFigures], pids: Iterable[int]) -> int | None:
    """Return the bytes that these processes occupy on all GPUs; None: no GPU knows any of them."""
    wanted = frozenset(pids)
    found = [nbytes for gpu in gpus for pid, nbytes in gpu.memory_of.items() if pid in wanted]
    return sum(found) if found else None
