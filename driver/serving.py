"""The name that `driver.replicas` had in 0.2; to be removed after the next minor release."""

import warnings

from driver.replicas import BlockingServer, ModelServer, QueueFull, ServeOptions, Serving

__all__ = ["BlockingServer", "ModelServer", "QueueFull", "ServeOptions", "Serving"]

warnings.warn("driver.serving is driver.replicas now", DeprecationWarning, stacklevel=2)
