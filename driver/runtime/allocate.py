"""Memory for inputs and outputs of compiled models: on their device if they have one and it allocates, else shared."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple, Protocol

from burst import InvalidArgument, PeerDied, StatusError
from driver.client.device_buffers import BufferRole
from driver.engine.device_memory import describe
from driver.runtime.shared_buffers import SharedBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.client.device_buffers import Buffer, BufferDesc
    from driver.client.executor import Executor
    from driver.nn import Model

_log = logging.getLogger("driver.runtime")


class StepRole(NamedTuple):
    """An input or output of what is prepared for one step of a model."""

    prepared: Executor
    is_input: bool
    io_index: int


class Allocatable(Protocol):
    """A compiled model, as far as its buffers need to know it."""

    model: Model

    @property
    def number(self) -> int: ...

    def step_roles(self, io_index: int, *, is_input: bool) -> list[StepRole]:
        """Return which steps read and write that input or output. Raise ValueError when the model is closed."""


def allocate(
    desc: BufferDesc,
    models: Sequence[Allocatable],
    input_roles: Sequence[BufferRole] = (),
    output_roles: Sequence[BufferRole] = (),
) -> Buffer:
    """Allocate memory for inputs and outputs of compiled models, to be named in requests of these and their bursts.

    It is on the device if exactly one connected device is behind all roles, and it allocates; else it is shared memory,
    which all devices and the CPU read and write in place. `buffer.is_on_device` says which. Models that are compiled
    for the same connected device (`devices=[device, "cpu"]`) share a buffer there; those that connect by name do not.

    Raise InvalidArgument for roles that are given twice, do not exist or contradict each other;
    ResourceExhaustedPersistent when there is no memory; ValueError for a model that is closed.
    """
    dimensions = tuple(desc.dimensions)
    if not all(type(d) is int and 0 <= d < 2**32 for d in dimensions):
        raise InvalidArgument(f"dimensions={dimensions!r:.80}: each must be an integer of 32 bits, without a sign")
    kind, dimensions, roles = describe(dimensions, models, input_roles, output_roles)
    sides = (True, input_roles), (False, output_roles)
    frequencies = {
        step: role.frequency
        for is_input, side in sides
        for role in side
        for step in models[role.model_index].step_roles(role.io_index, is_input=is_input)
    }
    desc = desc._replace(dimensions=dimensions)
    return _on_device(desc, frequencies) or SharedBuffer(kind, dimensions, roles, in_place=desc.in_place)


def _on_device(desc: BufferDesc, frequencies: dict[StepRole, float]) -> Buffer | None:
    """Return a buffer on the device behind the roles; None: there is none, or several, or it does not allocate."""
    found = list(dict.fromkeys(role.prepared for role in frequencies))
    remote = [prepared.remote for prepared in found if prepared.remote]
    if not found or len(remote) < len(found) or len({one.device for one in remote}) > 1:
        return None
    sides: tuple[list[BufferRole], list[BufferRole]] = [], []
    for (prepared, is_input, io_index), frequency in frequencies.items():
        sides[not is_input].append(BufferRole(found.index(prepared), io_index, frequency))
    device = remote[0].device
    try:
        return device.allocate(desc, remote, *sides)
    except (StatusError, PeerDied) as error:
        _log.info("device %r allocates no buffer (%s); it is in shared memory", device.address, error)
        return None
