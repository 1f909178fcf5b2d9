"""The `burst` command: `driver.cli.command` lists the sub-commands and the modules that define them."""

from driver.cli.entry import main

__all__ = ["main"]
