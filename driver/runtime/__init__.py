"""The runtime: measures devices, chooses one for each operation, and runs the steps, with the CPU as a safety net."""
