"""The C files that a program needs which uses ends of queues and nothing of bursts."""

_ENDS = ("queue", "sleep", "ring", "readers", "event", "futex")
_PROCESS = ("life", "link", "bridge", "processors", "thread", "memory")
CORE = tuple(f"fmq/{name}.c" for name in (*_ENDS, *_PROCESS))
