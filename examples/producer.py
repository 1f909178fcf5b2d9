"""Sends numbered blocks through a queue in shared memory.

    python examples/producer.py --rate 1000            # and python examples/consumer.py, before or after
    python examples/producer.py --spawn --count 10000  # starts its own consumer through multiprocessing

Both meet in shared memory of one name; the first to come makes the queue. Either may be killed and started again: the
other one says so, waits, and goes on. Each run numbers its blocks from 0 under a session number of its own, so that the
consumer tells a restart from a loss. Ctrl-C ends with the summary. Who leaves last, and leaves the queue empty, removes
its name; after a crash `--unlink` does.
"""

import argparse
import contextlib
import multiprocessing
import secrets
import sys
import time

import numpy as np
from consumer import arguments, block_dtype, consume, leave, meet, show, wait_for_peer

import fmq


def send(writer, block):
    """One block, however long it takes; a consumer that is gone is waited for."""
    while True:
        try:
            block["sent_ns"] = time.monotonic_ns()
            return writer.write(block, timeout=0.2)
        except fmq.Timeout:
            continue  # the queue is full, and its consumer is alive or has not come yet
        except (fmq.PeerDied, fmq.Closed):
            wait_for_peer(writer, "producer", "consumer")


def produce(writer, dtype, count, rate):
    """Sends blocks at `rate` a second (0: as fast as they are taken) until `count` are out, or Ctrl-C."""
    block = np.zeros(1, dtype)
    block["session"] = secrets.randbits(63)
    sent, begin = 0, time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        print(f"producer: writing; the consumer is {writer.peer}", flush=True)
        while count is None or sent < count:
            if rate:
                time.sleep(max(0.0, begin + sent / rate - time.monotonic()))
            block["number"] = sent
            block["payload"] = sent % 256
            send(writer, block)
            sent += 1
            show(f"{sent} blocks sent", sent)
    seconds = max(time.monotonic() - begin, 1e-9)
    print(f"producer: {sent} blocks in {seconds:.1f} s ({sent / seconds:.0f}/s)", flush=True)


def own_consumer(descriptor):
    """What runs in the other process."""
    with fmq.MessageQueue.open(descriptor).reader() as reader:
        sys.exit(consume(reader, until_closed=True).lost > 0)


def with_own_consumer(options):
    """Both sides from one command: the queue has no name, its descriptor is an argument of the other process."""
    dtype = block_dtype(options.bytes)
    with fmq.MessageQueue.create(dtype, options.capacity) as queue, queue.writer() as writer:
        context = multiprocessing.get_context(options.start_method)
        consumer = context.Process(target=own_consumer, args=(queue.descriptor,))
        consumer.start()
        produce(writer, dtype, options.count, options.rate)
        writer.close()  # the consumer reads what is left, and ends
        with contextlib.suppress(KeyboardInterrupt):
            consumer.join()
    return consumer.exitcode


def frequency(text):
    """Blocks a second."""
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1e9:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1e9")


def main():
    parser = arguments(__doc__)
    parser.add_argument("--rate", type=frequency, default=1000, help="blocks a second, 0: no limit (default 1000)")
    parser.add_argument("--spawn", action="store_true", help="start a consumer of one's own, without a name")
    parser.add_argument("--start-method", choices=("fork", "spawn", "forkserver"), default="spawn", help="for --spawn")
    options = parser.parse_args()
    if options.unlink:
        return fmq.unlink(options.name)
    if options.spawn:
        return with_own_consumer(options)
    dtype = block_dtype(options.bytes)
    queue, writer = meet(options.name, dtype, options.capacity, "writer")
    with writer:
        produce(writer, dtype, options.count, options.rate)
    leave(queue, "reader", "writer")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (fmq.FmqError, OSError, ValueError) as problem:
        sys.exit(f"producer: {problem}")
