"""Where other protocols and cameras come in: each is a client of a device."""
