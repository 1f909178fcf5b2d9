"""Runs .jax files with JAX on NVIDIA's GPUs. Not tried on a GPU yet."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from driver.devices.cuda_files import CudaFileDevice
from driver.devices.jax import JaxDevice, jax_module
from driver.devices.nvidia import cuda_needs
from driver.plugins import version_of

if TYPE_CHECKING:
    from driver.devices.jax import JaxModel
    from driver.nn import Model

_PLUGINS = "jax-cuda13-plugin", "jax-cuda12-plugin"


class JaxCudaDevice(CudaFileDevice, JaxDevice):
    """Runs functions that JAX has exported for CUDA."""

    name, version, type = "jax-cuda", f"1 (JAX {version_of('jax')})", "GPU"
    platform = "cuda"
    needs = cuda_needs(JaxDevice.needs)

    def configure(self) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes three quarters of the GPU
        if percent := self.chosen.get("memory_percent"):
            os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(int(percent) / 100)
        flags = [os.environ.get("XLA_FLAGS", "")]
        if self.chosen["deterministic"]:
            flags.append("--xla_gpu_deterministic_ops=true")
        if not self.chosen["graphs"]:
            flags.append("--xla_gpu_enable_command_buffer=")  # of no kind; XLA's default has most kinds of kernels
        os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
        jax_module(self.platform).config.update("jax_cuda_visible_devices", str(self.ordinal))

    @classmethod
    def missing_build(cls) -> str | None:
        has_plugin = any(version_of(name) != "none" for name in _PLUGINS)
        return None if has_plugin else f"JAX has no CUDA: neither {_PLUGINS[0]} nor {_PLUGINS[1]} is installed"

    @classmethod
    def remedy(cls) -> str | None:
        return "pip install 'jax[cuda13]', and NVIDIA's driver (docs/howto/gpu.md)"

    def model_of(self, model: Model, exported: Any) -> JaxModel:
        """Return the function for the GPU. Raise CudaMissing, CudaFailed, InvalidModel, and what JAX raises."""
        from driver.devices.cuda.jax_program import JaxCudaModel

        return JaxCudaModel(self.gpu, model, exported)
