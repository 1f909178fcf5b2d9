"""Bursts and processes: recipes that travel, children that are forked, and interpreters that end."""

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

X = np.array([[1, 2, 3, 4]], np.float32)
HERE = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"


class TestPickle:
    @pytest.mark.integration
    def test_recipe(self, connect, kit):
        """An unpickled prepared model is the same one, prepared again on the device of that name by another process."""
        code = """
import pickle, sys, numpy as np
prepared = pickle.load(sys.stdin.buffer)
with prepared.device, prepared, prepared.burst() as burst:
    x = np.array([[1, 2, 3, 4]], np.float32)
    assert (prepared.run(x)[0] == x + 5).all() and (burst.run(x).outputs[0] == x + 5).all()
    print(prepared.device.address, prepared.preference, prepared.device.engine_pid)
"""
        with connect("Slow").prepare(kit.add_model(5.0), preference="low_power") as prepared:
            with kit.python(code, stdin=-1, stdout=-1) as child:
                out, _ = child.communicate(pickle.dumps(prepared), kit.patience)
                assert child.returncode == 0
            assert out.decode().split() == [kit.odd("Slow"), "low_power", str(prepared.device.engine_pid)]

    @pytest.mark.parametrize("name", ["add", "conv", "quantised", "reshape", "open", "optional"])
    def test_model(self, kit, name):
        """A model travels whole."""
        model = getattr(kit, f"{name}_model")()
        again = pickle.loads(pickle.dumps(model))
        assert len(again.main.operands) == len(model.main.operands)
        for a, b in zip(again.main.operands, model.main.operands, strict=True):
            assert (a.type, a.dimensions, a.lifetime, a.channel_quant) == (
                b.type,
                b.dimensions,
                b.lifetime,
                b.channel_quant,
            )
            assert np.array_equal(a.value, b.value)
        assert again.main.operations == model.main.operations

    def test_burst(self, device, kit):
        """A burst is no recipe, and says what to do instead."""
        with device.prepare(kit.add_model()) as prepared, prepared.burst() as burst:
            for function in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match="cannot be pickled: pickle its model, and open a burst"):
                    function(burst)
            assert burst.run(X).outputs[0].tolist() == (X + 1).tolist()


FORK = """
import os, sys, threading, time, numpy as np, driver, asyncio
from small_models import add_model, odd
x = np.full((1, 4), 9, np.float32)
zero = np.zeros((1, 4), np.float32)
with driver.connect(odd("Slow")) as device, device.prepare(add_model()) as prepared:
    with prepared.burst(depth=DEPTH, policy=POLICY) as burst:
        burst.run(zero)
        done = burst.submit(zero)
        done.result()
        results = burst.stream_results([zero], feedback={"output_0": "input_0"}, most=2, also=["output_0"])
        next(results)
        array = burst.inputs[0]
        array[...] = x
        future = burst.submit()
        thread = threading.Thread(target=future.result)
        thread.start()
        while not burst._in_flight.receiving.locked():
            os.sched_yield()
        if not (child := os.fork()):
            async def each():
                return [r async for r in burst.stream([zero])]
            uses = {
                "run": lambda: burst.run(), "run(x)": lambda: burst.run(zero), "submit": lambda: burst.submit(),
                "submit(x)": lambda: burst.submit(zero), "inputs": lambda: burst.inputs, "stats": lambda: burst.stats(),
                "trace": lambda: burst.trace("/dev/null"), "result": lambda: future.result(),
                "result(t)": lambda: future.result(1), "exception": lambda: future.exception(),
                "cancel": lambda: future.cancel(), "run_async": lambda: asyncio.run(burst.run_async(zero)),
                "stream": lambda: asyncio.run(each()), "free": lambda: burst.free_memory(None),
                "execute": lambda: burst.execute(None), "results": lambda: next(results),
            }
            said = {}
            for name, use in uses.items():
                try:
                    said[name] = use()
                except driver.DriverError as error:
                    said[name] = "before a fork" in str(error)
                except BaseException as error:
                    said[name] = repr(error)
            wrong = {name: what for name, what in said.items() if what is not True}
            wrong |= {} if done.result().outputs[0].sum() == 4 else {"done": done.result()}
            results.close()
            burst.close()
            burst.close()
            print(wrong, file=sys.stderr) if wrong else None
            os._exit(1 if wrong else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        array[0, 0] = 0
        thread.join()
        assert future.result().outputs[0].tolist() == [[1, 10, 10, 10]]
        assert [result.outputs[0].sum() for result in results] == [8]
        assert (burst.run(zero).outputs[0] == 1).all()
        assert (burst.submit(zero).result().outputs[0] == 1).all()
        assert asyncio.run(burst.run_async(zero)).outputs[0].sum() == 4
"""


@pytest.mark.parametrize(
    ("depth", "policy"),
    [
        (4, "block"),
        *(pytest.param(*case, marks=pytest.mark.integration) for case in ((1, "block"), (1, "latest"), (2, "reject"))),
    ],
)
def test_fork(connect, kit, depth, policy):
    """In a forked child every call of a burst and its futures says so at once; the parent's does not notice."""
    connect("Slow")
    code = HERE + FORK.replace("DEPTH", str(depth)).replace("POLICY", repr(policy))
    with kit.python(code) as client:
        assert client.wait(2 * kit.patience) == 0


ENDINGS = {
    "open": "",
    "in flight": "burst.submit(x)",
    "held": "held = burst.run().outputs[0]",
    "asyncio": "import asyncio; asyncio.run(burst.run_async(x))",
    "left loop": """
import asyncio
loop = asyncio.new_event_loop()
loop.run_until_complete(burst.run_async(x))
loop.close()""",
    "closed": "burst.close(); prepared.close(); device.close()",
    "cycle": "burst.me = burst; del burst; import gc; gc.collect()",
}


@pytest.mark.parametrize(
    "ending",
    [name if name in ("in flight", "held") else pytest.param(name, marks=pytest.mark.integration) for name in ENDINGS],
)
def test_end_of_the_interpreter(connect, kit, ending):
    """An interpreter that ends with open bursts ends in silence, in development mode with every warning shown."""
    connect("Slow")
    code = f"""{HERE}
import logging, numpy as np, driver
from small_models import add_model, odd
logging.getLogger("asyncio").setLevel(logging.ERROR)  # which otherwise tells what a busy machine makes slow
x = np.zeros((1, 4), np.float32)
device = driver.connect(odd("Slow"))
prepared = device.prepare(add_model())
burst = prepared.burst(depth=2)
burst.run(x)
{ENDINGS[ending]}
"""
    with kit.python(code, stderr=-1, dev=True) as it:
        _, errors = it.communicate(timeout=kit.patience)
    assert errors.decode() == ""
    assert it.returncode == 0
