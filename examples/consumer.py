"""Takes numbered blocks from a queue, and says how fast they came, how old they were, and whether one is missing.

    python examples/consumer.py                 # in one terminal
    python examples/producer.py --rate 1000     # in another, before or after

Both meet in shared memory of one name; the first to come makes the queue. Either may be killed and started again:
the other one says so, waits, and goes on, and no block that was sent is lost. Ctrl-C ends with the summary. Who leaves
last, and leaves the queue empty, removes its name; after a crash `--unlink` does.
"""

import argparse
import collections
import contextlib
import sys
import time

import numpy as np

import fmq


def block_dtype(payload):
    """A block: which run of the producer, its number in that run, when it was sent (CLOCK_MONOTONIC), and bytes."""
    return np.dtype([("session", "u8"), ("number", "u8"), ("sent_ns", "u8"), ("payload", "u1", (payload,))])


def meet(name, dtype, capacity, role):
    """(queue, end): opens the queue of that name or makes it, and takes the role, which a killed owner frees late."""
    for tries_left in reversed(range(200)):
        try:
            queue = fmq.MessageQueue.open(name)
        except FileNotFoundError:
            try:
                queue = fmq.MessageQueue.create(dtype, capacity, name=name)
            except FileExistsError:
                continue  # the other one was faster: open his
        if queue.dtype != dtype:
            held, wanted = queue.dtype.itemsize - 24, dtype.itemsize - 24
            raise ValueError(f"--bytes {wanted}: the queue {name} was made for {held}; give that, or --unlink it first")
        try:
            return queue, getattr(queue, role)()
        except fmq.RoleTaken:
            if not tries_left:
                raise
            time.sleep(0.01)


def leave(queue, other_role, own_role):
    """Removes the queue's name when no process uses it any more and nothing is left in it."""
    with contextlib.suppress(fmq.RoleTaken, FileNotFoundError), contextlib.ExitStack() as ends:
        held = {role: ends.enter_context(getattr(queue, role)()) for role in (other_role, own_role)}
        if not held["reader"].available:
            fmq.unlink(queue.name)


def wait_for_peer(end, who, what):
    """Says that the other side is gone, and waits for the next one."""
    print(f"{who}: the {what} is {end.peer}; waiting for the next one", flush=True)
    while end.peer != "alive" and not end.available:  # a short-lived one may have come and gone
        time.sleep(0.02)
    print(f"{who}: a {what} is here", flush=True)


def show(line, number):
    """A line that overwrites itself, now and then, for a person."""
    if number % 1000 == 0 and sys.stderr.isatty():
        print(f"\r{line}\x1b[K", end="", file=sys.stderr)


class Tally:
    """What came: how many, how fast, how old, and which numbers were missing."""

    def __init__(self):
        self.blocks = self.lost = self.sessions = self.session = self.expected = self.begin = 0
        self.ages_ns = collections.deque(maxlen=100_000)

    def count(self, block):
        """Numbers start at 0 in each session; only the first block of all may have any number."""
        number, now = int(block["number"]), time.monotonic_ns()
        if block["session"] != self.session:
            self.expected = 0 if self.sessions else number
            self.session, self.sessions = block["session"], self.sessions + 1
        self.lost += number - self.expected
        self.expected = number + 1
        self.blocks += 1
        self.begin = self.begin or now
        self.ages_ns.append(now - int(block["sent_ns"]))

    def __str__(self):
        seconds = (time.monotonic_ns() - self.begin) / 1e9 if self.blocks else 1e-9
        text = f"{self.blocks} blocks in {seconds:.1f} s ({self.blocks / seconds:.0f}/s), {self.lost} lost"
        text += f", {self.sessions} producer{'s' * (self.sessions != 1)}"
        p50, p99, most = np.percentile(self.ages_ns or [0], (50, 99, 100)) / 1e3
        return f"{text}, age p50 {p50:.0f} p99 {p99:.0f} max {most:.0f} us"


def consume(reader, count=None, until_closed=False):
    """Reads until `count` blocks came, or Ctrl-C, or (if asked) until the producer has left. Returns the tally."""
    tally = Tally()
    with contextlib.suppress(KeyboardInterrupt):
        print(f"consumer: reading; the producer is {reader.peer}", flush=True)
        while count is None or tally.blocks < count:
            show(tally, tally.blocks)
            try:
                tally.count(reader.read(1, timeout=0.2)[0])
            except fmq.Timeout:
                continue
            except (fmq.Closed, fmq.PeerDied) as gone:
                if until_closed and isinstance(gone, fmq.Closed):
                    break
                wait_for_peer(reader, "consumer", "producer")
    print(f"consumer: {tally}", flush=True)
    return tally


def positive(text):
    """A whole number from 1 to 2**30."""
    if text.isdecimal() and 1 <= int(text) <= 2**30:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {2**30}")


def arguments(description):
    """What both programs understand."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="/burst-blocks", help="of the queue in shared memory (default %(default)s)")
    parser.add_argument("--bytes", type=positive, default=1024, help="payload of a block (default %(default)s)")
    parser.add_argument("--capacity", type=positive, default=256, help="of the queue, in blocks (default %(default)s)")
    parser.add_argument("--count", type=positive, help="end after so many blocks; without it, go on until Ctrl-C")
    parser.add_argument("--unlink", action="store_true", help="remove the name that a crash left behind, and end")
    return parser


def main():
    options = arguments(__doc__).parse_args()
    if options.unlink:
        return fmq.unlink(options.name)
    queue, reader = meet(options.name, block_dtype(options.bytes), options.capacity, "reader")
    with reader:
        tally = consume(reader, options.count)
    leave(queue, "writer", "reader")
    return int(tally.lost > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (fmq.FmqError, OSError, ValueError) as problem:
        sys.exit(f"consumer: {problem}")
