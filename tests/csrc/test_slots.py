"""The client's table of slots (csrc/burst/slots.c), under sanitizers."""

import pytest


@pytest.mark.integration
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_slots(build, sanitizer):
    """Slot 2^31 - 1 is the last one; a descriptor that its owner closed, or that stands for another file by now, is not
    sent; threads that use, drop and describe slots at once lose none.
    """
    sources = ("burst/messages.c", "burst/failure.c", "fmq/futex.c")
    run = build("slots.c", *sources, flags=("-pthread", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"))
    assert "good" in run()
