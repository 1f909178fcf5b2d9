"""Which model files may enter the engine: those that passed a trial, on this device or now, and are not quarantined."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from burst import GeneralFailure
from driver.devices.files import file_digest
from driver.engine.running_files import OVERDUE
from driver.errors import signal_name
from driver.nn.file_form import FILE, file_of, is_file
from driver.options import LOW
from driver.service.file_records import FileRecords
from driver.service.trials import UNPROVOKED, PatientTrial, TrialEnded, TrialPlaces, TrialServer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from driver.engine.running_files import FileEnd
    from driver.interface import Device
    from driver.nn import Model
    from driver.protocol.prepare_arguments import PrepareArguments


class FileGate:
    """Admits model files to the engine of one device. Any thread."""

    def __init__(self, device: Device, name: str, most: int, account: int | None = None) -> None:
        """Fork the trial server if the device runs files: no thread may exist yet. `most`: bytes that trials may take
        together. Others: as of `FileRecords`.
        """
        self.records = FileRecords(device, name, account)
        self._trials = TrialServer(device, most) if FILE.name in {known.name for known in device.extensions} else None
        self._places: defaultdict[int, TrialPlaces] = defaultdict(TrialPlaces)

    @contextmanager
    def admitted(
        self, uid: int, model: Model | None, fds: Sequence[int], where: Sequence[Any], arguments: PrepareArguments
    ) -> Iterator[bytes]:
        """Let the engine load that account's model in these descriptors meanwhile; yield the digest of its file, b"" if
        it is none. `model`: None for one of operations.

        A file that is new here is loaded in a trial before, and runs in it meanwhile. Raise GeneralFailure for a file
        that is quarantined, or ends its trial, which may be on leaving; MissedDeadlineTransient; and what stands for
        the error of a device that refuses the file.
        """
        if self._trials is None or model is None or not is_file(model):
            yield b""
            return
        file = file_of(model)
        assert file is not None
        digest = file_digest(file)
        self.check(digest)
        if self.records.has_passed(digest):
            yield digest
            return
        low, deadline = arguments.priority == LOW, arguments.deadline
        begin = partial(self._trials.begin, fds, where, arguments.preference, gives_way=low)
        try:
            with PatientTrial(begin, self._places[uid], deadline) as trial:
                trial.wait_until_loaded()
                yield digest
                trial.wait_until_run()
        except TrialEnded as error:
            raise self._refused(digest, error) from error
        self.records.note_passed(digest)

    def check(self, digest: bytes) -> None:
        """Raise GeneralFailure for a file that is quarantined. b"": the model is no file."""
        if digest and (reason := self.records.quarantined(digest)):
            raise GeneralFailure(f"the model file {name_of(digest)} is quarantined on this device: {reason}")

    def note_end(self, code: int, running: Sequence[FileEnd]) -> None:
        """Note that the engine ended, with this exit status or minus this signal, while these files were running."""
        overdue = [each for each in running if each.signal == OVERDUE]
        guilty = [each for each in running if each.signal not in {0, OVERDUE}]
        for each in overdue:
            self.records.suspect(each.digest, "it ran on after its deadline or cancellation, and so ended the engine")
        for each in guilty:
            self.records.quarantine(each.digest, f"a run of it ended the engine with {signal_name(each.signal)}")
        digests = {each.digest for each in running}
        if code and -code not in UNPROVOKED and not overdue and not guilty and len(digests) == 1:
            self.records.suspect(
                digests.pop(), "the engine ended while it ran alone"
            )  # in a thread of the runtime's own

    def close(self) -> None:
        """Save what is known of files."""
        self.records.close()

    def _refused(self, digest: bytes, error: TrialEnded) -> GeneralFailure:
        if error.is_by_file:
            self.records.quarantine(digest, str(error))
        state = "is quarantined on this device now" if error.is_by_file else "was not loaded"
        return GeneralFailure(f"the model file {name_of(digest)} {state}: {error}")


def name_of(digest: bytes) -> str:
    """Return a file's name in messages: the first digits of its digest."""
    return digest.hex()[:12]
