"""Wyoming, the protocol of Home Assistant's voice satellites: wake words of openWakeWord's models on one device.

wake_server.py   `burst serve DEVICE --wyoming ADDRESS --wake-word FILE`: everything below, until SIGTERM
satellite.py   one connection: what its messages do, and when a word counts as spoken
message_reader.py   the messages of a connection, none of which is too long, or takes too long
wake_stream.py   the sound of one satellite, 80 ms at a time, and what the models make of it
wake_models.py   the three kinds of model, one of each for all satellites
announcement.py   tells Home Assistant where the server is
satellite_figures.py   what each satellite has sent, for Prometheus
"""
