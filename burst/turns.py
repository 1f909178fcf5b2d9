"""The former name of `burst.run_queue`, for devices that were written when it was called so."""

from burst.run_queue import checkpoint, stoppable

__all__ = ["checkpoint", "stoppable"]
