"""One model for many concurrent callers: replicas behind one bounded queue. `CompiledModel.serve` makes it."""

from driver.replicas.blocking import BlockingServer
from driver.replicas.model_server import ModelServer
from driver.replicas.options import ServeOptions
from driver.replicas.serve_context import Serving
from driver.replicas.waiting import QueueFull

__all__ = ["BlockingServer", "ModelServer", "QueueFull", "ServeOptions", "Serving"]
