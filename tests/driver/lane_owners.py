"""The owner of a lane, for tests of lanes without a client: executions of one slot, charged to nothing."""

from burst import Memory
from burst.run_queue import Application, Flow, RunQueue, Share
from driver.engine.lane import LaneOwner
from driver.engine.ledger import Claim
from driver.engine.limits import Limits


def lane_owner(bind, model, **limits):
    """Which binds by `bind`, and finds models by `model`; `limits`: beside those of a megabyte."""
    flow = Flow(Application(Share(RunQueue(1, 1e-3), 1), "test"), 1)
    return LaneOwner(
        bind=bind,
        model=model,
        flow=lambda _: flow,
        memory_from=Memory.from_wire,
        take=lambda *_, **__: Claim(lambda: None),
        enter=lambda: None,
        slots=1,
        limits=Limits(client_bytes=1 << 20, device_bytes=1 << 20, **limits),
    )
