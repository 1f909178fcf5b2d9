"""The C files that a program needs which uses ends of queues and nothing of bursts."""

ENDS = tuple(f"fmq/{name}.c" for name in ("queue", "sleep", "ring", "readers", "event", "futex"))
"""These, for one that has a process of its own (`fmq_this_process`)."""
CORE = (*ENDS, *(f"fmq/{name}.c" for name in ("life", "link", "bridge", "processors", "thread", "memory")))
