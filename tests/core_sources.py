"""The C files that a program needs which uses ends of queues and nothing of bursts."""

CORE = tuple(
    f"fmq/{name}.c"
    for name in ("queue", "sleep", "ring", "seats", "event", "futex", "life", "link", "processors", "thread", "memory")
)
