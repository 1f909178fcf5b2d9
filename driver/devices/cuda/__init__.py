"""CUDA by its driver API: one context for all clients of an engine, memory, streams, and pools for the GPU."""

from driver.devices.cuda.context import CudaContext, CudaStream, DeviceMemory
from driver.devices.cuda.driver_api import CudaFailed, CudaMissing, CudaOutOfMemory

__all__ = ["CudaContext", "CudaFailed", "CudaMissing", "CudaOutOfMemory", "CudaStream", "DeviceMemory"]
