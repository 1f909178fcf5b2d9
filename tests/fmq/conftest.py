"""Fixtures of the queue's tests. `fmq_peers` lies beside this file so that spawned processes can import it by name."""

import sys
from pathlib import Path

import pytest

import fmq

sys.path.insert(0, str(Path(__file__).parent))

import fmq_peers


@pytest.fixture
def pair():
    """A function that makes the two ends of a new queue; they are closed after the test."""
    made = []

    def make(dtype="u1", capacity=16, **how):
        with fmq.MessageQueue.create(dtype, capacity, **how) as queue:
            made.extend(ends := (queue.writer(), queue.reader()))
        return ends

    yield make
    for end in made:
        end.close()


@pytest.fixture
def name():
    """A name for shared memory that nobody else uses, removed after the test."""
    chosen = fmq_peers.new_name()
    yield chosen
    if Path("/dev/shm" + chosen).exists():
        fmq.unlink(chosen)
