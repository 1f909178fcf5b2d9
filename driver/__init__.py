"""driver knows what an execution means and who runs it: models, devices, and the way to them."""

import os
from typing import TYPE_CHECKING

from driver import foundations  # noqa: F401 (it looks at what the next lines need)

# isort: split
from driver.late_names import late_names

if TYPE_CHECKING:
    from burst.errors import (
        DeviceUnavailable,
        GeneralFailure,
        InvalidArgument,
        MissedDeadlinePersistent,
        MissedDeadlineTransient,
        OutputInsufficientSize,
        ResourceExhaustedPersistent,
        ResourceExhaustedTransient,
        StatusError,
    )
    from burst.memory import HardwareBuffer, Memory, Usage
    from driver.client.burst import Burst
    from driver.client.connecting import connect
    from driver.client.device import RemoteDevice
    from driver.client.device_buffers import Buffer, BufferDesc, BufferRole
    from driver.client.fenced import ExecutionInfo, FencedExecution
    from driver.client.prepared_model import RemotePreparedModel
    from driver.client.retry import retry
    from driver.client.surface import AnyBurst, AnyPreparedModel
    from driver.errors import (
        CameraFailed,
        CameraLost,
        DeviceFailed,
        DeviceNotFound,
        DriverError,
        ImportFailed,
        InvalidModel,
        NotPlaced,
    )
    from driver.gateways.v4l2.camera_stream import Camera, CameraFrame
    from driver.importers import load
    from driver.interface import (
        CacheFiles,
        Capabilities,
        Device,
        DeviceInfo,
        DeviceStatus,
        Performance,
        PreparedModel,
        Saved,
    )
    from driver.interpreter import set_executable
    from driver.nn import Model, ModelBuilder, Operand, Operation, Subgraph
    from driver.options import Batch, Cache
    from driver.protocol.fences import FenceState
    from driver.runtime.allocate import allocate
    from driver.runtime.capabilities import devices
    from driver.runtime.chain import Chain
    from driver.runtime.compilation import compile  # noqa: A004 (the name that users look for)
    from driver.runtime.compiled import CompiledModel
    from driver.runtime.model_check import check
    from fmq.version import __version__ as __version__

__all__ = [
    "AnyBurst",
    "AnyPreparedModel",
    "Batch",
    "Buffer",
    "BufferDesc",
    "BufferRole",
    "Burst",
    "Cache",
    "CacheFiles",
    "Camera",
    "CameraFailed",
    "CameraFrame",
    "CameraLost",
    "Capabilities",
    "Chain",
    "CompiledModel",
    "Device",
    "DeviceFailed",
    "DeviceInfo",
    "DeviceNotFound",
    "DeviceStatus",
    "DeviceUnavailable",
    "DriverError",
    "ExecutionInfo",
    "FenceState",
    "FencedExecution",
    "GeneralFailure",
    "HardwareBuffer",
    "ImportFailed",
    "InvalidArgument",
    "InvalidModel",
    "Memory",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "Model",
    "ModelBuilder",
    "NotPlaced",
    "Operand",
    "Operation",
    "OutputInsufficientSize",
    "Performance",
    "PreparedModel",
    "RemoteDevice",
    "RemotePreparedModel",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "Saved",
    "StatusError",
    "Subgraph",
    "Usage",
    "allocate",
    "check",
    "compile",
    "connect",
    "devices",
    "load",
    "retry",
    "set_executable",
]

__getattr__, __dir__ = late_names(
    __name__,
    {
        "burst.errors": "DeviceUnavailable GeneralFailure InvalidArgument MissedDeadlinePersistent "
        "MissedDeadlineTransient OutputInsufficientSize ResourceExhaustedPersistent "
        "ResourceExhaustedTransient StatusError",
        "burst.memory": "HardwareBuffer Memory Usage",
        "driver.client.burst": "Burst",
        "driver.client.connecting": "connect",
        "driver.client.device": "RemoteDevice",
        "driver.client.device_buffers": "Buffer BufferDesc BufferRole",
        "driver.client.fenced": "ExecutionInfo FencedExecution",
        "driver.client.prepared_model": "RemotePreparedModel",
        "driver.client.retry": "retry",
        "driver.client.surface": "AnyBurst AnyPreparedModel",
        "driver.errors": "CameraFailed CameraLost DeviceFailed DeviceNotFound DriverError ImportFailed InvalidModel "
        "NotPlaced",
        "driver.gateways.v4l2.camera_stream": "Camera CameraFrame",
        "driver.importers": "load",
        "driver.interface": "CacheFiles Capabilities Device DeviceInfo DeviceStatus Performance PreparedModel Saved",
        "driver.interpreter": "set_executable",
        "driver.nn": "Model ModelBuilder Operand Operation Subgraph",
        "driver.options": "Batch Cache",
        "driver.protocol.fences": "FenceState",
        "driver.runtime.allocate": "allocate",
        "driver.runtime.capabilities": "devices",
        "driver.runtime.chain": "Chain",
        "driver.runtime.compilation": "compile",
        "driver.runtime.compiled": "CompiledModel",
        "driver.runtime.model_check": "check",
        "fmq.version": "__version__",
    },
    folders=["devices"],
)

if os.environ.get("BURST_RECORD"):
    from driver.recording import recorder as _recorder  # noqa: F401 (it records what this asks for)
