"""Request streams in files: what a program asked of devices is recorded, and played again on any device.

docs/recording.md says what such a file holds, byte by byte.
"""

from driver.recording.file import BadRecording, Recording, Run
from driver.recording.recorder import record
from driver.recording.replay import Difference, Report, replay
from driver.recording.tape import Tape

__all__ = ["BadRecording", "Difference", "Recording", "Report", "Run", "Tape", "record", "replay"]
