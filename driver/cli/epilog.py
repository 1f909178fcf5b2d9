"""What stands at the end of a command's help."""


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: one example per line, not wrapped."""
    return "\n  ".join(("\b\nExamples:", *lines))
