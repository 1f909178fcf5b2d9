"""Devices that are odd, narrow or broken on purpose, for tests and benches: device processes find them installed."""
