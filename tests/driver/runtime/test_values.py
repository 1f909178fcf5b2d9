"""Values between parts of a model: where they lie, and how much room they get."""

import numpy as np
import pytest

import driver
from burst import ErrorStatus, OutputShape, Result
from driver.client.job import Job
from driver.runtime.values import PartOfModel, Rooms, Temporaries


@pytest.fixture
def open_model():
    """A model whose output may have any size."""
    builder = driver.ModelBuilder()
    x = builder.input("float32", (0,))
    builder.output(builder.operation("ADD", x, np.ones(1, np.float32), 0))
    return builder.build()


def test_a_size_that_a_device_claims_counts_when_it_has_succeeded(open_model):
    """A claim by which it then fails costs that execution its memory, and no later one."""
    lengths, answers = [], []

    def perform(job):
        lengths.append(job.request.outputs[0].length)
        return answers.pop(0)

    def short(size):
        return Result(ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, output_shapes=(OutputShape((size,), False),))

    def run(*its):
        answers[:] = its
        x = scope.place(16, (4,))
        result, (made,) = part.run(job, [x], [None], scope)
        return result.status, made.shape

    part, scope = PartOfModel(open_model, perform), Temporaries(Rooms())
    job = Job(part.request(None, [scope.place(16, (4,))], [scope.place(16, (4,))]))
    done = Result(ErrorStatus.NONE, output_shapes=(OutputShape((3000,), True),))
    assert run(short(10**7), Result(ErrorStatus.GENERAL_FAILURE))[0] == ErrorStatus.GENERAL_FAILURE
    assert run(short(3000), done) == (ErrorStatus.NONE, (3000,))
    assert run(done) == (ErrorStatus.NONE, (3000,))
    first, claimed, second, grown, kept = lengths
    assert first == second < grown == kept < claimed
    assert kept >= 4 * 3000
