"""Requests that come again in the same bytes."""

import time

import pytest
from waiting import nested

from driver.gateways.oip import messages
from driver.gateways.oip.grpc_door import GrpcFront
from driver.gateways.oip.inference import InferAnswer
from driver.gateways.refusal import Refusal


class Recorder:
    """A service that keeps the calls that it gets."""

    is_traced = False

    def __init__(self):
        self.calls = []

    def infer(self, call):
        self.calls.append(call)
        return InferAnswer(call.model, "1", call.id, [])


def placed(offset, **parameters):
    request = messages.ModelInferRequest(model_name="m")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[4])
    tensor.parameters["shared_memory_region"].string_param = "region"
    tensor.parameters["shared_memory_byte_size"].int64_param = 16
    tensor.parameters["shared_memory_offset"].int64_param = offset
    for name, value in parameters.items():
        request.parameters[name].int64_param = value
    return request.SerializeToString()


def test_same_bytes():
    """They are the same call with a deadline of its own, of the transport and of the request; others are another."""
    service = Recorder()
    front = GrpcFront(service)
    begin = time.monotonic()
    for left in (100.0, 200.0, None):
        front.answer("ModelInfer", placed(0), left)
    front.answer("ModelInfer", placed(0, timeout=5_000_000, priority=1), 100.0)
    front.answer("ModelInfer", placed(0, timeout=5_000_000, priority=1), 1.0)
    front.answer("ModelInfer", placed(64), None)
    end = time.monotonic()
    first, second, third, timed, sooner, other = service.calls
    assert second._replace(deadline=None) == third == first._replace(deadline=None)
    assert first.given is second.given is third.given
    for one, left in [(first, 100), (second, 200), (timed, 5), (sooner, 1)]:
        nested(begin + left, one.deadline, end + left)
    assert timed.priority == sooner.priority == "high"
    assert other.given[0].place.offset == 64


def test_bad_bytes():
    """What is refused is refused each time."""
    front = GrpcFront(Recorder())
    for _ in range(2):
        with pytest.raises(Refusal):
            front.answer("ModelInfer", placed(0, priority=77), None)
        with pytest.raises(Refusal):
            front.answer("ModelInfer", b"\xff" * 8, None)


def test_many():
    """Any number of different requests are answered, and each as it asks."""
    service = Recorder()
    front = GrpcFront(service)
    for offset in [*range(200), *range(200)]:
        front.answer("ModelInfer", placed(offset), None)
    assert [call.given[0].place.offset for call in service.calls] == [*range(200)] * 2
