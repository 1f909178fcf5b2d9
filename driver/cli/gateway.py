"""What the commands of gateways have in common: how they say where they serve, and what went wrong."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from burst import BurstError
from driver.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@contextmanager
def gateway_errors(option: str, extra: str) -> Iterator[None]:
    """What a gateway cannot do is a mistake of the command line. option: of the gateway; extra: that installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.UsageError(f"{option} needs {error.name}: pip install 'burst-engine[{extra}]'") from error
    except (DriverError, BurstError) as error:
        raise click.UsageError(str(error)) from error


def tell_where(as_json: bool, fields: Mapping[str, object], line: str) -> None:
    """Prints and flushes: another program waits for it. fields: device, the address, and perhaps metrics."""
    if as_json:
        print(json.dumps(fields), flush=True)
        return
    print(f"{fields['device']}: {line}", flush=True)
    if fields.get("metrics"):
        print(f"metrics and health are at {fields['metrics']}", flush=True)
