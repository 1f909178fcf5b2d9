"""Gateways in `burst serve`: options of those that are installed, and the life of the one that the user asks for."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from burst import BurstError
from driver.cli.epilog import examples
from driver.cli.output import echo
from driver.errors import DriverError
from driver.gateway import GatewayCall, InstalledGateway, OpenGateway, installed_gateways
from driver.service.bounded_log import BoundedHandler

if TYPE_CHECKING:
    from collections.abc import Sequence

_STDERR = 2
_ENDS = (signal.SIGTERM, signal.SIGINT)


class AskedGateway(NamedTuple):
    """option: the first of its options on the command line. values: of all its options, by parameter name."""

    gateway: InstalledGateway
    option: str
    values: dict[str, Any]


class ServeCommand(click.Command):
    """A command with the options of all installed gateways beside its own."""

    def __init__(self, *arguments: Any, examples_of_device: Sequence[str] = (), **words: Any) -> None:
        super().__init__(*arguments, **words)
        self._own = [param for param in self.params if isinstance(param, click.Option)]
        self._gateways: list[tuple[InstalledGateway, list[click.Option]]] = []
        self._broken: list[InstalledGateway] = []
        for each in installed_gateways():
            self._add(each)
        lines = [line for each, _ in self._gateways if each.gateway for line in each.gateway.examples]
        self.epilog = examples(*examples_of_device, *lines)

    def _add(self, found: InstalledGateway) -> None:
        """Take over the options of a gateway; one whose options cannot be used counts as broken."""
        options: list[click.Option] = []
        if found.gateway:
            try:
                options = list(found.gateway.options())
                self._check_free(options)
            except Exception as error:  # noqa: BLE001 (code of another distribution: told to the user)
                found = found.broken(error)
        if found.gateway is None:
            self._broken.append(found)
        else:
            self._gateways.append((found, options))
            self.params.extend(options)

    def _check_free(self, options: Sequence[click.Option]) -> None:
        """Raise ValueError if an option, or its parameter, has the name of another one."""
        taken = {word for param in self.params for word in (param.name, *param.opts)}
        for option in options:
            if taken & {option.name, *option.opts}:
                raise ValueError(f"burst serve has an option {option.opts[0]} already")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of each gateway in a section of their own, and which gateways are broken."""
        sections = [("Options", [*self._own, *filter(None, [self.get_help_option(ctx)])])]
        for found, options in self._gateways:
            lacks = f"; {found.lacks}" if found.lacks else ""
            sections.append((f"Gateway {found.name} ({found.distribution}{lacks})", list(options)))
        for heading, params in sections:
            if rows := [record for param in params if (record := param.get_help_record(ctx))]:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        if self._broken:
            with formatter.section("Gateways that cannot be used"):
                formatter.write_dl([(f"{each.name} ({each.distribution})", each.fault) for each in self._broken])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Add to the error for an unknown option which gateways are broken: it may be an option of one of them."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            faults = [f"the {each} cannot be used: {each.fault}" for each in self._broken]
            words = "; ".join([error.message, *faults])
            raise click.NoSuchOption(error.option_name, words, error.possibilities, error.ctx) from None

    def asked(self, ctx: click.Context) -> list[AskedGateway]:
        """Return the gateways of which the command line has options."""
        found = []
        for gateway, options in self._gateways:
            if given := [option for option in options if _is_given(ctx, option)]:
                values = {option.name or "": ctx.params[option.name or ""] for option in options}
                found.append(AskedGateway(gateway, given[0].opts[0], values))
        return found


def _is_given(ctx: click.Context, option: click.Option) -> bool:
    source = ctx.get_parameter_source(option.name or "")
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)


def serve_gateway(asked: AskedGateway, call: GatewayCall, as_json: bool) -> None:
    """Serve until SIGTERM or SIGINT.

    Raise UsageError for what the user can correct, and ClickException that names the gateway for any other error of it.
    """
    found = asked.gateway
    if found.lacks:
        raise click.UsageError(f"{asked.option}: {found.lacks}")
    handler = BoundedHandler(partial(os.write, _STDERR), "the gateway's log", "%(message)s")
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        asyncio.run(_serve(found, call, as_json))
    except click.ClickException:
        raise
    except (DriverError, BurstError) as error:
        raise click.UsageError(str(error)) from error
    except Exception as error:
        traceback.print_exc()
        remedy = f"; {found.remedy}" if isinstance(error, ModuleNotFoundError) and found.remedy else ""
        raise click.ClickException(f"the {found} failed: {type(error).__name__}: {error}{remedy}") from error


async def _serve(found: InstalledGateway, call: GatewayCall, as_json: bool) -> None:
    assert found.gateway
    end, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in _ENDS:
        loop.add_signal_handler(number, end.set)
    async with found.gateway.serve(call) as opened:
        _tell(call.device, opened, as_json)
        await end.wait()


def _tell(device: str, opened: OpenGateway, as_json: bool) -> None:
    """Print where it serves and flush: another program waits for this line."""
    if as_json:
        echo(json.dumps({"device": device, **opened.fields}))
        return
    echo(f"{device}: {opened.line}")
    if opened.fields.get("metrics"):
        echo(f"metrics and health are at {opened.fields['metrics']}")
