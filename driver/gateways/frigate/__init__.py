"""Object detection for Frigate: its `zmq_ipc` detector protocol, and what a detector plug-in of it needs.

process.py   `burst serve DEVICE --frigate ADDRESS --model FILE --model-type TYPE`: everything below, until SIGTERM
door.py   the socket: which message gets which answer; exchange.py   the messages; zmtp.py   ZeroMQ below them
peer_name.py   which detector a connection is of
frame_detector.py   one model of one type: which frames it takes, and twenty rows from what `detection` finds
counts.py   what was asked and answered, for /metrics
"""

from driver.gateways.frigate.frame_detector import FrameDetector, WrongFrame

__all__ = ["FrameDetector", "WrongFrame"]
