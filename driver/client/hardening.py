"""What the kernel says of how a process is confined."""

from __future__ import annotations

from pathlib import Path

_FILTERED = "2"


def confinement(pid: int) -> dict[str, bool] | None:
    """Whether system calls are filtered (seccomp) and new privileges excluded; None where the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines)
        return {"seccomp": fields["Seccomp"] == _FILTERED, "no_new_privileges": fields["NoNewPrivs"] == "1"}
    except (OSError, ValueError, KeyError):
        return None
