"""The `burst` command and its sub-commands."""

from __future__ import annotations

import click

from driver.cli.cache import cache
from driver.cli.doctor import doctor
from driver.cli.serve import serve
from driver.cli.top import top
from driver.cli.trace import trace
from driver.cli.vts import vts


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="burst-engine", prog_name="burst")
def burst() -> None:
    """Runs neural networks in other processes."""


burst.add_command(cache)
burst.add_command(doctor)
burst.add_command(serve)
burst.add_command(top)
burst.add_command(trace)
burst.add_command(vts)
