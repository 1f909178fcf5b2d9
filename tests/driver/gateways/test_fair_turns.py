"""Turns at what a gateway has little of: who asks for much waits, and nobody else."""

import asyncio

import pytest

from driver.gateways.fair_turns import FairTurns


class Work:
    """Pieces of work that end when they may, and the order in which they have begun."""

    def __init__(self, most):
        self.turns, self.begun, self._may_end = FairTurns(most), [], {}

    def ask(self, name, share=1):
        """Have a piece of the account in the first letter of its name wait for its turn."""
        self._may_end[name] = asyncio.Event()
        return asyncio.create_task(self._do(name, share))

    async def _do(self, name, share):
        async with self.turns.taken(name[0], share):
            self.begun.append(name)
            await self._may_end[name].wait()

    async def end(self, name):
        """Let one end, and what then may begin, begin."""
        self._may_end[name].set()
        await settle()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


def test_accounts_alternate():
    """One that asks once has the next turn but one at the latest, however much another one has asked for before."""

    async def run():
        work = Work(2)
        tasks = [work.ask(f"a{n}") for n in range(6)]
        await settle()
        tasks += [work.ask("b0"), work.ask("c0")]
        await settle()
        assert work.begun == ["a0", "a1"]
        for name in ("a0", "a1", "a2"):
            await work.end(name)
        assert work.begun[:5] == ["a0", "a1", "a2", "b0", "c0"]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("when", ["waiting", "working"])
def test_one_that_is_given_up(when):
    """What is cancelled while it waits or works leaves its turn to the next, and nothing is lost by that."""

    async def run():
        work = Work(1)
        first, second, third = (work.ask(name) for name in ("a0", "b0", "c0"))
        await settle()
        (second if when == "waiting" else first).cancel()
        await settle()
        if when == "waiting":
            await work.end("a0")
        assert work.begun == ["a0", "c0" if when == "waiting" else "b0"]
        for task in (first, second, third):
            task.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        again = work.ask("d0")
        await settle()
        assert work.begun[-1] == "d0"
        again.cancel()

    asyncio.run(run())


def test_shares():
    """Pieces of work that are large take more of it; one that is larger than all takes all."""

    async def run():
        work = Work(10)
        tasks = [work.ask("a0", 6), work.ask("b0", 6), work.ask("c0", 99)]
        await settle()
        assert work.begun == ["a0"]
        await work.end("a0")
        assert work.begun == ["a0", "b0"]
        await work.end("b0")
        assert work.begun == ["a0", "b0", "c0"]
        await work.end("c0")
        await asyncio.gather(*tasks)

    asyncio.run(run())
