"""Text that came from elsewhere, made safe to print.

A terminal acts on control characters: it sets its title, clears the screen, writes to the clipboard. Formatting
characters reorder what stands beside them. Names in model files, and messages of programs that are not trusted, may
contain both.
"""

from __future__ import annotations

_PICTURES = {code: chr(0x2400 + code) for code in range(0x20)} | {0x7F: "\u2421"}
"""The Unicode picture of each ASCII control character."""
_OTHER = "\ufffd"
LAYOUT = "\n\t"
"""The control characters that text of several lines needs."""


def printable(text: str, keep: str = "") -> str:
    """Return the text with a visible character in place of each that is not printable, except for those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _PICTURES.get(ord(c), _OTHER) for c in text)


def printable_line(raw: bytes) -> str:
    """Decode UTF-8 from another program into one printable line; white space of any kind becomes single spaces."""
    return printable(" ".join(raw.decode(errors="replace").split()))
