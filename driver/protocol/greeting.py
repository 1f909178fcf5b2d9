"""What a service says of its device to a client that says hello."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

from burst import Malformed
from driver.interface import CacheFiles

if TYPE_CHECKING:
    from collections.abc import Sequence


class Greeting(NamedTuple):
    """The answer to `hello`, in the order in which it travels."""

    protocol: int
    name: str
    version: str
    type: str
    service_pid: int
    engine_pid: int
    model_files: int  #: cache files that the device needs, of this kind and the next
    data_files: int
    extensions: Sequence[str]

    @classmethod
    def from_wire(cls, values: list[Any]) -> Self:
        """Read the values of an answer. Raise Malformed."""
        if len(values) != len(cls._fields):
            raise Malformed(f"hello was answered with {len(values)} values; they are {len(cls._fields)}")
        return cls(*values)

    @property
    def cache_files(self) -> CacheFiles:
        """The numbers of cache files that the device needs."""
        return CacheFiles(self.model_files, self.data_files)
