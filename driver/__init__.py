"""driver knows what an execution means and who runs it: models, devices, and the way to them."""

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
from burst.images import HardwareBuffer
from burst.memory import Memory, Usage
from driver.devices import devices
from driver.domains import Buffer, BufferDesc, BufferRole
from driver.errors import DeviceFailed, DeviceNotFound, DriverError, ImportFailed, InvalidModel, NotPlaced
from driver.fences import ExecutionInfo, FencedExecution
from driver.importers import load
from driver.interface import CacheFiles, Capabilities, Device, DeviceInfo, Performance, PreparedModel, Saved
from driver.nn import Model, ModelBuilder, Operand, Operation, Subgraph
from driver.prepared import RemotePreparedModel
from driver.remote import Cache, RemoteDevice, connect
from driver.retry import retry
from driver.runtime.chain import Chain
from driver.runtime.compilation import compile  # noqa: A004 (the name that users look for)
from driver.runtime.compiled import CompiledModel
from driver.session import Burst
from driver.sync import FenceState

__all__ = [
    "Buffer",
    "BufferDesc",
    "BufferRole",
    "Burst",
    "Cache",
    "CacheFiles",
    "Capabilities",
    "Chain",
    "CompiledModel",
    "Device",
    "DeviceFailed",
    "DeviceInfo",
    "DeviceNotFound",
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
    "compile",
    "connect",
    "devices",
    "load",
    "retry",
]
