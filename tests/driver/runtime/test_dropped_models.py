"""A compiled model ends with its last reference, and so do the pools of its requests, whatever it was used for."""

import gc
import weakref

import numpy as np
import pytest

import driver
from burst import ErrorStatus, Memory, Request, RequestArgument

X = np.arange(4, dtype=np.float32)
WAYS = {
    "execute": lambda compiled, request: compiled.execute(request),
    "execute_async": lambda compiled, request: compiled.execute_async(request).result(),
    "execute_fenced": lambda compiled, request: compiled.execute_fenced(request).result(),
    "burst": lambda compiled, request: compiled.burst().execute(request),
}
PLACES = {"one device": ["reference"], "several devices": ["Picky", "reference"], "this process": ["cpu"]}


@pytest.fixture
def no_garbage_collector():
    gc.disable()
    yield
    gc.enable()


def request_of(x):
    """On one pool: the input, and two outputs of its size."""
    pool = Memory.create(4096)
    pool.asarray(np.float32, 4)[:] = x
    places = [RequestArgument(pool=0, offset=offset, length=16) for offset in (0, 64, 128)]
    return Request(tuple(places[:1]), tuple(places[1:]), (pool,))


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("may_fall_back", [True, False], ids=["or the CPU", "no fallback"])
def test_it_is_gone_with_its_last_reference(place, may_fall_back, settled, runtime_kit, kit):
    """Nothing refers to it in a circle: no garbage collection is needed."""
    names = [name if name == "cpu" else settled(name, 0.5) for name in PLACES[place]]
    for use in WAYS.values():
        compiled = driver.compile(runtime_kit.mixed_model(), list(dict.fromkeys([*names, *["cpu"] * may_fall_back])))
        request = request_of(X)
        assert use(compiled, request).status is ErrorStatus.NONE
        gone = [weakref.ref(compiled), weakref.ref(request.pools[0])]
        del compiled, request
        kit.until(lambda gone=gone: all(found() is None for found in gone))  # a thread may be about to let it go
