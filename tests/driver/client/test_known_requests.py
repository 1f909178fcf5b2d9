"""Requests that take turns are encoded once each, on every way of the lane, until what they name goes."""

import numpy as np
import pytest

from burst import Memory, Request, RequestArgument
from driver.client import lane_socket
from driver.client.workspace import MOST_KNOWN

ROW = 16  # bytes


@pytest.fixture
def encoded(monkeypatch):
    """The requests that were encoded."""
    found, encode = [], lane_socket.encode_request

    def noting(model, request, pools, *, measure):
        found.append(request)
        return encode(model, request, pools, measure=measure)

    monkeypatch.setattr(lane_socket, "encode_request", noting)
    return found


class Chain:
    """Requests from each row of a memory to the next one."""

    def __init__(self, length):
        self.memory = Memory.create(ROW * (length + 1))
        self.rows = self.memory.asarray(np.float32, (length + 1, 4))
        places = [RequestArgument(offset=ROW * n, length=ROW) for n in range(length + 1)]
        self.requests = [Request((places[n],), (places[n + 1],), (self.memory,)) for n in range(length)]

    def check(self):
        """All have run."""
        assert self.rows[:, 0].tolist() == list(range(len(self.requests) + 1))
        self.rows[1:] = 0


def fenced(prepared, requests):
    executions = []
    for request in requests:
        executions.append(prepared.execute_fenced(request, executions[-1:]))
    executions[-1].result(60)


def plain(prepared, requests):
    for request in requests:
        prepared.execute(request)


def asynchronous(prepared, requests):
    for request in requests:
        prepared.execute_async(request).result(60)


@pytest.mark.parametrize("run", [fenced, plain])
def test_each_of_a_chain_is_encoded_once(run, device, kit, encoded):
    """However often the chain is sent, although others come between two of each."""
    chain = Chain(20)
    with device.prepare(kit.add_model()) as prepared:
        for _ in range(3):
            run(prepared, chain.requests)
            chain.check()
    assert encoded == chain.requests


def test_of_too_many_all_are_encoded_anew(device, kit, encoded):
    """A client keeps so many, and not one for each request that a program ever made."""
    chain = Chain(MOST_KNOWN + 1)
    with device.prepare(kit.add_model()) as prepared:
        for times in (1, 2):
            plain(prepared, chain.requests)
            chain.check()
            assert len(encoded) == times * len(chain.requests)


def test_memory_that_was_freed_is_sent_anew(device, kit, encoded):
    """The requests that named it are encoded anew, with the number that it has now."""
    chain = Chain(20)
    with device.prepare(kit.add_model()) as prepared:
        for times in (1, 2):
            fenced(prepared, chain.requests)
            chain.check()
            assert len(encoded) == times * len(chain.requests)
            prepared.free_memory(chain.memory)


def test_streams_displace_no_request_that_is_known(device, kit, encoded, monkeypatch):
    """They are opened on the socket of asynchronous executions, and what opens one is sent once."""
    monkeypatch.setattr(lane_socket, "MOST_KNOWN", 21)
    chain = Chain(20)
    with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
        for _ in range(2):
            asynchronous(prepared, chain.requests)
            chain.check()
            row = np.zeros((1, 4), np.float32)
            assert len(list(burst.stream_results([row], feedback={"output_0": "input_0"}, most=3))) == 3
    assert [request for request in encoded if chain.memory in request.pools] == chain.requests
    assert len(encoded) > len(chain.requests)


def test_the_newest_requests_are_tried_before_a_move(device, kit):
    """A few, by their last use."""
    chain = Chain(20)
    with device.prepare(kit.add_model()) as prepared:
        plain(prepared, [*chain.requests, chain.requests[5]])
        assert prepared.executor.requests() == [chain.requests[n] for n in (5, 19, 18, 17)]
