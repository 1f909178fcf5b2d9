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
from burst.memory import Memory
from driver.devices import devices
from driver.errors import DeviceFailed, DeviceNotFound, DriverError, ImportFailed, InvalidModel
from driver.importers import load
from driver.interface import Device, DeviceInfo, PreparedModel
from driver.nn import Model, ModelBuilder, Operand, Operation, Subgraph
from driver.prepared import RemotePreparedModel
from driver.remote import RemoteDevice, connect
from driver.session import Burst

__all__ = [
    "Burst",
    "Device",
    "DeviceFailed",
    "DeviceInfo",
    "DeviceNotFound",
    "DeviceUnavailable",
    "DriverError",
    "GeneralFailure",
    "ImportFailed",
    "InvalidArgument",
    "InvalidModel",
    "Memory",
    "MissedDeadlinePersistent",
    "MissedDeadlineTransient",
    "Model",
    "ModelBuilder",
    "Operand",
    "Operation",
    "OutputInsufficientSize",
    "PreparedModel",
    "RemoteDevice",
    "RemotePreparedModel",
    "ResourceExhaustedPersistent",
    "ResourceExhaustedTransient",
    "StatusError",
    "Subgraph",
    "connect",
    "devices",
    "load",
]
