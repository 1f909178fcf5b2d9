"""Imported before all others of this package: says what stands in the place of fmq, if something does."""

from burst_engine import expect, use_installed

use_installed("burst")
expect("fmq")
