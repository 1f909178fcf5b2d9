"""The `burst` command: a sub-command is a file of its own, and `driver.cli.command` lists them."""

from driver.cli.entry import main

__all__ = ["main"]
