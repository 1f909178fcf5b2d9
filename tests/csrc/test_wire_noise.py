"""The answers of a device that lies, decoded under AddressSanitizer and UndefinedBehaviorSanitizer."""

import random

import pytest
import stress
from wire_packets import GOLDEN, RESULTS, random_packet

SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
ROUNDS = 200_000
BELIEVED = ("if (rank > r->size - r->element)", "if (0)")  # a rank that is not compared with what is there
ENDLESS = ("if (r->element == r->size)", "if (0)")  # nor is the packet's own end


def packets(version):
    """What a device could say, each after its length."""
    rng = random.Random(1)
    direction = RESULTS[version]
    found = [golden.data for golden in GOLDEN if golden.direction == direction]
    found += [direction.encode(random_packet(rng, direction)) for _ in range(50)]
    return b"".join(len(one).to_bytes(4, "little") + one for one in found if len(one) <= 64 * 24)


@pytest.fixture
def decoded(build, tmp_path):
    """decoded(version, rounds, sources): runs the program on them; what it says."""

    def run(version, rounds, sources=None, **how):
        (tmp_path / "packets").write_bytes(packets(version))
        program = build("wire_noise.c", "burst/wire.c", flags=SANITIZE, sources=sources)
        return program(str(version), str(rounds), "1", tmp_path / "packets", **how)

    return run


@pytest.mark.integration
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(stress.times(200_000_000), marks=pytest.mark.stress)])
def test_no_answer_leads_beyond_its_own_bytes(decoded, version, rounds):
    """Two hundred thousand damaged results: refused with a reason, or their shapes keep within their counts."""
    done, accepted = map(int, decoded(version, rounds, timeout=3600).split())
    assert done == rounds
    assert rounds / 100 < accepted < rounds


@pytest.mark.integration
def test_a_count_that_is_believed_is_found(decoded, csrc):
    """Without the checks of what follows, the same noise is caught reading beyond a packet."""
    text = (csrc / "burst/wire.c").read_text()
    for old, new in (BELIEVED, ENDLESS):
        assert old in text
        text = text.replace(old, new)
    assert "AddressSanitizer" in decoded(2, ROUNDS, {"burst/wire.c": text}, fails=True)
