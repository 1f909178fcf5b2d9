"""The contract of gateways: each is a plug-in of `burst serve`, found by an entry point of the group `burst.gateways`.

A gateway speaks another protocol to programs that know nothing of Burst, and is a client of one device. `burst serve`
runs one gateway in a process of its own, so that a gateway that fails harms no other. A subclass of `Gateway` brings
its options, its checks for `burst doctor` and its server; nothing else of Burst knows it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from driver.plugins import distribution_of, remedy_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    import click

    from driver.finding import Finding

GROUP = "burst.gateways"


class GatewayCall(NamedTuple):
    """The user's request to serve.

    device: its name. options: values of the gateway's own options, by parameter name, defaults included.
    metrics: the address of `--metrics`.
    """

    device: str
    options: Mapping[str, Any]
    metrics: str | None = None


class OpenGateway(NamedTuple):
    """The address of a gateway that serves, as `burst serve` prints it: the line, or with --json the fields."""

    line: str
    fields: Mapping[str, Any]


class Gateway:
    """A protocol by which other programs use a device. The base class holds the defaults."""

    libraries: ClassVar[Sequence[str]] = ()
    """Modules that `serve` needs. An extra of the gateway's name in its distribution installs them."""

    examples: ClassVar[Sequence[str]] = ()
    """Command lines for `burst serve --help`."""

    def options(self) -> Sequence[click.Option]:
        """Return its options of `burst serve`. A user who gives one of them asks for this gateway."""
        return ()

    def serve(self, call: GatewayCall) -> AbstractAsyncContextManager[OpenGateway]:
        """Return a context manager that serves while it is entered. SIGTERM and SIGINT leave it.

        Raise DriverError or BurstError with what the user is to do: the command prints it and exits with 2. A gateway
        without options, which other programs load, is never called.
        """
        raise NotImplementedError(f"{type(self).__name__} does not serve")

    def checks(self) -> Mapping[str, Callable[[], Iterable[Finding]]]:
        """Return its checks for `burst doctor`, by subject."""
        return {}


class InstalledGateway(NamedTuple):
    """A gateway as its entry point names it. fault: why it cannot be used; the gateway is None then.

    remedy: the command that installs what it needs, if its distribution has an extra of its name.
    """

    name: str
    distribution: str
    gateway: Gateway | None
    fault: str = ""
    remedy: str = ""

    def broken(self, error: BaseException) -> InstalledGateway:
        """Return it without its gateway, because of that error."""
        return self._replace(gateway=None, fault=f"{type(error).__name__}: {error}")

    @property
    def lacks(self) -> str:
        """Libraries that are not installed, with the remedy; empty if it has all that it needs."""
        names = [name for name in self.gateway.libraries if find_spec(name) is None] if self.gateway else []
        return f"{', '.join(names)} not installed: {self.remedy or 'install it'}" if names else ""

    def __str__(self) -> str:
        return f"gateway {self.name!r} of {self.distribution}"


def installed_gateways() -> list[InstalledGateway]:
    """Return all gateways, by name. One that cannot be loaded has a fault, and does not affect the others."""
    found = []
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        row = InstalledGateway(entry.name, distribution_of(entry), None, remedy=remedy_for(entry) or "")
        try:
            its = entry.load()
            if not (isinstance(its, type) and issubclass(its, Gateway)):
                raise TypeError(f"{entry.value} is not a subclass of driver.gateway.Gateway")  # noqa: TRY301
            found.append(row._replace(gateway=its()))
        except Exception as error:  # noqa: BLE001 (code of another distribution: told to the user)
            found.append(row.broken(error))
    return found
