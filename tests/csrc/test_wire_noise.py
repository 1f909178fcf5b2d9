"""The packets of a peer that lies, decoded under AddressSanitizer and UndefinedBehaviorSanitizer."""

import random

import pytest
import stress
from wire_packets import DIRECTIONS, GOLDEN, REQUESTS, RESULTS, random_packet

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ROUNDS = 200_000
ENDLESS = ("if (r->element == r->size)", "if (0)")  # the packet's own end is not looked at
BELIEVED = {  # nor a count compared with what is there
    RESULTS[2]: "if (rank <= r->size - r->element) return 0;",
    REQUESTS[2]: "if (least > r->size)",
}


def packets(direction):
    """What a peer could say, each after its length."""
    rng = random.Random(1)
    found = [golden.data for golden in GOLDEN if golden.direction == direction]
    found += [direction.encode(random_packet(rng, direction)) for _ in range(50)]
    return b"".join(len(one).to_bytes(4, "little") + one for one in found if len(one) <= 64 * 24)


@pytest.fixture
def decoded(build, tmp_path):
    """decoded(direction, rounds, sources): runs the program on them; what it says."""

    def run(direction, rounds, sources=None, **how):
        (tmp_path / "packets").write_bytes(packets(direction))
        program = build("wire_noise.c", "burst/wire.c", flags=SANITIZE, sources=sources)
        return program(direction.kind, str(direction.version), str(rounds), "1", tmp_path / "packets", **how)

    return run


@pytest.mark.integration
@pytest.mark.parametrize("direction", DIRECTIONS, ids=str)
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(stress.times(100_000_000), marks=pytest.mark.stress)])
def test_no_packet_leads_beyond_its_own_bytes(decoded, direction, rounds):
    """Two hundred thousand damaged packets: refused with a reason, or canonical, and within their own counts."""
    done, accepted = map(int, decoded(direction, rounds, timeout=3600).split())
    assert done == rounds
    assert rounds / 100 < accepted < rounds


@pytest.mark.integration
@pytest.mark.parametrize("direction", BELIEVED, ids=str)
def test_a_count_that_is_believed_is_found(decoded, csrc, direction):
    """Without the checks of what follows, the same noise is caught reading or writing beyond its memory."""
    text = (csrc / "burst/wire.c").read_text()
    believed = BELIEVED[direction]
    for old, new in (
        (believed, believed.replace("if (", "if (1 || " if "return 0" in believed else "if (0 && ")),
        ENDLESS,
    ):
        assert old in text
        text = text.replace(old, new)
    assert "AddressSanitizer" in decoded(direction, ROUNDS, {"burst/wire.c": text}, fails=True)
