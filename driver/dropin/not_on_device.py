"""What is said when something stays in the program's own process."""


class NotOnDevice(Exception):
    """A session or a run that a device does not do: the reason, and what helps."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy
