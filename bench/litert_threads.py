"""The litert device with a given number of threads, whatever its configuration says: "litert_threads:One"."""

from __future__ import annotations

from driver.devices.litert import LiteRtDevice


class One(LiteRtDevice):
    """Every execution on the listener's thread alone."""

    def __init__(self) -> None:
        super().__init__(threads=1)


class Two(LiteRtDevice):
    """Every execution on two threads."""

    def __init__(self) -> None:
        super().__init__(threads=2)


class Four(LiteRtDevice):
    """Every execution on four threads."""

    def __init__(self) -> None:
        super().__init__(threads=4)


class Chosen(LiteRtDevice):
    """As many as the device chooses without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = None


NAMES = {1: f"{__name__}:One", 2: f"{__name__}:Two", 4: f"{__name__}:Four", None: f"{__name__}:Chosen"}
"""By the number of threads, None for the device's own choice."""
