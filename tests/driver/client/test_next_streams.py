"""The streams of a burst that follow one that has ended, in its memory."""

import numpy as np
import pytest
from counters import DONE, FEED, STEP, VALUE, begin, counter, numbers
from kills import SIDES, kill

import driver
from driver.client import device_stream
from driver.protocol.stream_terms import StreamTerms


class TestTheNext:
    """A stream that is like the last one of its burst has its memory, so the device knows each of its requests."""

    @pytest.fixture
    def asked(self, monkeypatch):
        """The requests of each stream that was opened, as the device gets them."""
        found, pack = [], StreamTerms.pack

        def packed(terms):
            found.append(terms.requests)
            return pack(terms)

        monkeypatch.setattr(StreamTerms, "pack", packed)
        return found

    @pytest.mark.parametrize("also", [[], [VALUE]])
    @pytest.mark.parametrize("recover", [False, True])
    def test_the_same_requests(self, device, asked, also, recover):
        """For any count and inputs; its results are its own."""
        with device.prepare(counter()) as prepared, prepared.burst(depth=3, recover=recover) as burst:
            for most, step in (9, 0), (4, 5), (1, 7), (12, 100):
                inputs = begin() | {STEP: np.full(4, step, np.float32)}
                found = numbers(
                    burst.stream_results(inputs, feedback=FEED, most=most, also=also), VALUE if also else DONE
                )
                assert found == ([step + n for n in range(1, most + 1)] if also else [0] * most)
        assert len(asked) == 3
        assert len(set(asked)) == 1

    def test_results_that_are_held(self, counting, asked):
        """They keep their values, and their memory."""
        first = list(counting.stream_results(begin(), feedback=FEED, most=3, also=[VALUE]))
        assert numbers(counting.stream_results(begin(), feedback=FEED, most=9, also=[VALUE])) == list(range(1, 10))
        assert numbers(first) == [1, 2, 3]
        assert len(set(asked)) == 2

    def test_a_state_that_was_taken(self, counting):
        """It stays the caller's, whatever streams follow; also that of a stream that lives on."""
        kept = counting.stream_results(begin(), feedback=FEED, most=4)
        numbers(kept, DONE)
        taken = counting.stream_results(begin(), feedback=FEED, most=7)
        numbers(taken, DONE)
        states = [taken.state]
        del taken
        for _ in range(2):
            numbers(counting.stream_results(begin(), feedback=FEED, most=2), DONE)
        states.append(kept.state)
        goes_on = [counting.stream_results(begin() | its, feedback=FEED, most=1, also=[VALUE]) for its in states]
        assert [numbers(stream) for stream in goes_on] == [[8], [5]]

    def test_another_stream(self, counting, asked):
        """One that tells another output, or one beside a stream that has not ended, has memory of its own."""
        numbers(counting.stream_results(begin(), feedback=FEED, most=3), DONE)
        assert numbers(counting.stream_results(begin(), feedback=FEED, most=3, also=[VALUE])) == [1, 2, 3]
        pair = [counting.stream_results(begin(), feedback=FEED, most=3, also=[VALUE]) for _ in range(2)]
        assert [numbers(stream) for stream in pair] == [[1, 2, 3]] * 2
        assert len(set(asked)) == 3

    @pytest.mark.parametrize("side", SIDES)
    def test_a_death_between_two(self, place, side):
        """The next stream of a burst that recovers has new memory, and the one after it has that."""
        with (
            driver.connect("reference") as device,
            device.prepare(counter()) as prepared,
            prepared.burst(recover=True, depth=2) as burst,
        ):
            for n in range(4):
                inputs = begin() | {STEP: np.full(4, n, np.float32)}
                stream = burst.stream_results(inputs, feedback=FEED, until={VALUE: n + 9})
                assert numbers(stream) == list(range(n + 1, n + 10))
                del stream
                if n == 1:
                    kill(device, side)

    def test_the_end_of_its_burst(self, device, kit, made_in):
        """It is freed with the burst, also what a stream had that the caller holds until then."""
        memories = made_in(device_stream, "StepMemory")
        with device.prepare(counter()) as prepared:
            burst = prepared.burst()
            held, done = (burst.stream_results(begin(), feedback=FEED, most=3) for _ in range(2))
            assert [len(list(stream)) for stream in (held, done)] == [3, 3]
            assert len(memories) == 2
            del done
            burst.close()
            del held
            kit.until(lambda: not memories)
