"""One model for many concurrent callers: replicas behind one bounded queue. `CompiledModel.serve` makes it."""

from driver.serving.blocking import BlockingServer
from driver.serving.options import ServeOptions
from driver.serving.server import ModelServer
from driver.serving.serving import Serving
from driver.serving.waiting import QueueFull

__all__ = ["BlockingServer", "ModelServer", "QueueFull", "ServeOptions", "Serving"]
