"""Imported before all others of this package: in a clone that is not built, the installed package takes its place."""

from burst_engine import use_installed

use_installed("fmq")
