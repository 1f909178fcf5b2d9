"""Drivers in shared libraries: burst_device.h, the adapter that makes a `driver.Device` of one, and what builds one."""
