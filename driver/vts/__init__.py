"""The conformance kit: what a device has to do, as tests that its author runs against it (`burst vts DEVICE`).

A device is reached as any client reaches it: by name, over its socket and through bursts. One file holds one category
of tests, `driver.vts.catalogue` lists them all, and `driver.vts.kit` runs them.
"""
