"""read_async, write_async and add_reader: a queue in an event loop, which waits for it without a thread per end."""

import asyncio
import contextlib
import os
import select
import threading

import numpy as np
import pytest
from fmq_peers import bridges, holder, must_raise, process, take, thread, write_array, write_blocks
from waiting import PATIENCE, until

import fmq


def run(main, *arguments):
    """The coroutine function's result, in a loop of its own."""
    return asyncio.run(asyncio.wait_for(main(*arguments), 2 * PATIENCE))


async def awaited(end):
    """Until a task awaits this end."""
    while end._async_readiness is None or end._async_readiness._waiter is None:
        await asyncio.sleep(0)


async def raises(kind, awaitable):
    with pytest.raises(kind):
        await asyncio.wait_for(awaitable, PATIENCE)


def test_what_is_there_is_read_without_a_thread():
    """No bridge and no descriptor for transfers that do not wait."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()

    async def main():
        before = len(os.listdir("/proc/self/fd"))
        await w.write_async([1, 2])
        assert list(await r.read_async(2)) == [1, 2]
        assert len(await r.read_async(0)) == 0
        assert len(os.listdir("/proc/self/fd")) <= before

    run(main)
    assert (r._async_readiness, w._async_readiness) == (None, None)


def test_who_does_not_use_it_has_no_bridge():
    """A fresh process that writes, reads, sleeps and waits for several has no such thread."""

    def child():
        queue = fmq.MessageQueue.create("i8", 4)
        w, r = queue.writer(), queue.reader()
        with thread(r.read, 1, PATIENCE):
            w.write([1])
        must_raise(fmq.Timeout, fmq.wait_any, [r], 0.01)
        assert bridges() == 0
        r.fileno()
        until(lambda: bridges() == 1)  # it names itself

    with process(child):
        pass


@pytest.mark.parametrize("flavour", fmq.Flavour)
def test_elements_that_come_in_parts(flavour):
    """Five are awaited, and come one by one, in one piece; the loop runs on meanwhile."""
    queue = fmq.MessageQueue.create("i8", 8, flavour)
    w, r = queue.writer(), queue.reader()

    async def main():
        reading = asyncio.ensure_future(r.read_async(5))
        for i in range(5):
            await awaited(r)
            assert not reading.done()
            w.write([i])
            await asyncio.sleep(0)
        assert list(await asyncio.wait_for(reading, PATIENCE)) == [0, 1, 2, 3, 4]

    run(main)


@pytest.mark.parametrize("writer", ["in a loop", "plain"])
def test_from_another_process(writer):
    """A thousand blocks through a ring of two, from a process that writes in a loop of its own, or plainly."""
    queue = fmq.MessageQueue.create("i8", 32)

    async def main():
        with queue.reader() as r:
            for i in range(1000):
                assert (await r.read_async(16)).tolist() == list(range(16 * i, 16 * i + 16))

    target = write_async if writer == "in a loop" else write_blocks
    with process(target, queue.descriptor, 0, 1000, 16):
        run(main)


def write_async(descriptor, first, count, block):
    async def main():
        with fmq.MessageQueue.open(descriptor).writer() as w:
            for i in range(first, first + count):
                await w.write_async(np.arange(i * block, (i + 1) * block))

    run(main)


def test_a_full_queue_is_awaited():
    """write_async goes on as soon as there is room for all; room for some does not do."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()
    w.write([1, 2, 3, 4])

    async def main():
        writing = asyncio.ensure_future(w.write_async([5, 6]))
        await awaited(w)
        r.read(1)
        await asyncio.sleep(0)
        assert not writing.done()
        r.read(1)
        await asyncio.wait_for(writing, PATIENCE)
        assert list(r.read(4)) == [3, 4, 5, 6]

    run(main)


def test_cancellation_loses_nothing():
    """A task that is cancelled again and again while elements arrive takes all or none; a plain read gets the rest."""
    queue = fmq.MessageQueue.create("i8", 1000)
    w, r = queue.writer(), queue.reader()
    got = []

    async def main():
        for i in range(200):
            reading = asyncio.ensure_future(r.read_async(3))
            await asyncio.sleep(0)
            w.write([2 * i, 2 * i + 1])
            await asyncio.sleep(0)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                got.extend(await reading)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(r.read_async(1000), 0.01)

    run(main)
    assert [*got, *r.read(r.available)] == list(range(400))


def test_a_cancelled_write_writes_nothing():
    """Neither then nor later."""
    queue = fmq.MessageQueue.create("i8", 2)
    w, r = queue.writer(), queue.reader()
    w.write([1, 2])

    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(w.write_async([3]), 0.01)
        assert list(r.read(2)) == [1, 2]
        await asyncio.sleep(0)
        assert r.available == 0

    run(main)


def test_a_hundred_ends_in_one_loop_have_two_bridges():
    """63 ends each; every end is woken by its own element."""
    with process(await_a_hundred):
        pass


def await_a_hundred():
    ends = [(queue.writer(), queue.reader()) for queue in (fmq.MessageQueue.create("i8", 4) for _ in range(100))]

    async def main():
        reading = [asyncio.ensure_future(r.read_async(1)) for _, r in ends]
        for _, r in ends:
            await awaited(r)
        assert bridges() <= 2
        for i in reversed(range(100)):
            ends[i][0].write([i])
        assert [int(block[0]) for block in await asyncio.gather(*reading)] == list(range(100))

    run(main)
    assert bridges() <= 2


def test_the_peers_death_is_told():
    """PeerDied in the task, soon after a kill -9, with what was left in the queue still there."""
    queue = fmq.MessageQueue.create("i8", 4)
    r = queue.reader()
    with process(write_array, queue.descriptor, np.array([1])):
        assert r.read(1, PATIENCE)
    with pytest.raises(fmq.Closed):
        r.read(1, PATIENCE)
    take(queue, "writer").close()

    async def main(victim):
        reading = asyncio.ensure_future(r.read_async(1))
        await awaited(r)
        victim.kill()
        await raises(fmq.PeerDied, reading)

    with holder(queue) as victim:
        run(main, victim)
    run(lambda: raises(fmq.PeerDied, r.read_async(1)))


def test_the_peers_close_is_told():
    """Closed, in a reader and in a writer, awaited or not; what was left is read first."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()
    w.write([1])

    async def main():
        reading = asyncio.ensure_future(r.read_async(2))
        await awaited(r)
        w.close()
        await raises(fmq.Closed, reading)
        assert list(await r.read_async(1)) == [1]
        await raises(fmq.Closed, r.read_async(1))
        with queue.writer() as again:
            again.write([0] * 4)
            writing = asyncio.ensure_future(again.write_async([5]))
            await awaited(again)
            r.close()
            await raises(fmq.Closed, writing)

    run(main)


def test_an_end_that_is_closed_while_awaited():
    """By the loop's thread or another one: the task gets Closed, and the descriptor is given back."""
    before = None
    for from_thread in (False, True, True, True):
        queue = fmq.MessageQueue.create("i8", 4)
        r = queue.reader()

        async def main(r=r, from_thread=from_thread):
            reading = asyncio.ensure_future(r.read_async(1))
            await awaited(r)
            closing = threading.Thread(target=r.close)
            if from_thread:
                closing.start()
            else:
                r.close()
            await raises(fmq.Closed, reading)
            await raises(fmq.Closed, r.read_async(1))
            if from_thread:
                closing.join()

        run(main)
        queue.close()
        held = len(os.listdir("/proc/self/fd"))
        before = held if before is None else before
        assert held <= before


def test_one_task_at_a_time():
    """A second task that would wait for the same end gets Busy; the first one is not disturbed."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()

    async def main():
        reading = asyncio.ensure_future(r.read_async(1))
        await awaited(r)
        await raises(fmq.Busy, r.read_async(1))
        w.write([1])
        assert list(await asyncio.wait_for(reading, PATIENCE)) == [1]

    run(main)


def test_a_thread_that_tries_meanwhile_does_not_deafen_the_task():
    """A read elsewhere that timed out takes no wake from the task that awaits the same end."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()

    async def main():
        reading = asyncio.ensure_future(r.read_async(2))
        await awaited(r)
        await asyncio.to_thread(must_raise, fmq.Timeout, r.read, 1, 0.01)
        w.write([1, 2])
        assert list(await asyncio.wait_for(reading, PATIENCE)) == [1, 2]

    run(main)


def test_wrong_arguments_name_themselves():
    """At once, not after a wait; also for an end that cannot announce that it sleeps."""
    queue = fmq.MessageQueue.create("i8", 4, fmq.Flavour.UNSYNCHRONIZED)
    observer = fmq.MessageQueue.open(queue.descriptor.read_only()).reader()

    w, r = queue.writer(), queue.reader()

    async def main():
        for call in (lambda: r.read_async(5), lambda: w.write_async([0] * 5)):
            with pytest.raises(ValueError, match=r"n=5.*4"):
                await call()
        with pytest.raises(ValueError, match="writable"):
            await observer.read_async(1)

    run(main)


def test_an_overrun_is_told():
    """A stream's reader that awaits more than it gets in time."""
    queue = fmq.MessageQueue.create("i8", 4, fmq.Flavour.UNSYNCHRONIZED)
    w, r = queue.writer(), queue.reader()

    async def main():
        reading = asyncio.ensure_future(r.read_async(4))
        await awaited(r)
        w.write([0, 1, 2])
        w.write([3, 4])
        await raises(fmq.Overrun, reading)

    run(main)


def test_add_reader_takes_an_end():
    """fileno makes an end an argument of add_reader: its callback reads what is there, until the peer is gone."""
    queue = fmq.MessageQueue.create("i8", 64)
    got = []

    async def main():
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        with queue.reader() as r:

            def readable():
                try:
                    got.extend(r.read(1, 1e-9))
                except fmq.Closed:
                    over.set()

            loop.add_reader(r, readable)
            with process(write_array, queue.descriptor, np.arange(20)):
                await asyncio.wait_for(over.wait(), PATIENCE)
            loop.remove_reader(r)

    run(main)
    assert got == list(range(20))


def test_an_end_moves_to_a_new_loop():
    """Loops come and go, also with a task that was cancelled in the old one, or left behind in it."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()

    async def cancelled():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(r.read_async(1), 0.001)

    async def read():
        reading = asyncio.ensure_future(r.read_async(1))
        await awaited(r)
        w.write([1])
        return list(await reading)

    async def leave():
        task = asyncio.ensure_future(r.read_async(1))  # asyncio.run cancels it
        await awaited(r)
        del task

    for _ in range(3):
        run(cancelled)
        assert run(read) == [1]
        asyncio.run(leave())


def test_a_close_waits_for_a_thread_that_arms(monkeypatch):
    """What that one has hung up is taken down: the bridge never writes to a descriptor that has become another's."""
    queue = fmq.MessageQueue.create("i8", 4)
    w, r = queue.writer(), queue.reader()
    near, far = os.pipe2(os.O_NONBLOCK)
    readiness = fmq.readiness.ReadinessFd(r.handle)
    fd, bridge, closing = readiness.fd, fmq.readiness.lib.fmq_bridge, threading.Thread(target=readiness.close)

    class Preempted:
        """The C core, in whose `fmq_bridge` another thread begins to close when the bell hangs."""

        fmq_unhang = fmq.readiness.lib.fmq_unhang

        def fmq_bridge(self, *arguments):
            token = bridge(*arguments)
            closing.start()
            until(lambda: readiness.is_closed)
            return token

    monkeypatch.setattr(fmq.readiness, "lib", Preempted())
    readiness.arm(1)
    closing.join(PATIENCE)
    monkeypatch.undo()
    os.dup2(far, fd)
    w.write([1])
    later = fmq.MessageQueue.create("i8", 4)
    v, s = later.writer(), later.reader()
    v.write([1])
    assert select.select([s.fileno()], [], [], PATIENCE)[0]  # the bridge has looked at all that hangs
    with pytest.raises(BlockingIOError):
        os.read(near, 8)
    for it in (near, far, fd):
        os.close(it)
