"""Records a program's requests to devices in a file, and replays them on any device.

docs/recording.md describes the file format, byte by byte.
"""

from driver.recording.file import BadRecording, Recording, Run
from driver.recording.recorder import record
from driver.recording.replay import Difference, ReplayReport, replay
from driver.recording.tape import Tape

__all__ = ["BadRecording", "Difference", "Recording", "ReplayReport", "Run", "Tape", "record", "replay"]
