"""Imported before all others of this package: says what stands in the place of fmq or burst, if something does."""

from burst_engine import expect

expect("fmq", "burst")
