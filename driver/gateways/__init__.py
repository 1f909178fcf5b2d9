"""Where other protocols come in: each gateway is a client of a device, and a process of its own."""
