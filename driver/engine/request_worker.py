"""The part that `PlainServer` and `LaunchServer` have in common: from the bytes of a request to a bound plan.

A plan is kept under the packed bytes of its request, so the same request is decoded, checked and bound once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burst import InvalidArgument, Malformed, Memory, StatusError
from burst.channel import Message
from burst.executor import CachedExecutor, DecodedRequest, RequestCodec
from burst.exhaustion import exhausted
from burst.server import MAX_PLANS
from burst.slots import checked_slots
from driver.protocol.plain_codec import decode_request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst import Request
    from burst.execution import Execution
    from burst.executor import Encode, Plan
    from burst.exhaustion import DescriptorsLost
    from burst.run_queue import Flow


class RequestWorker:
    """Registered memory and plans of one connection.

    Callers hold `lock` while they look up, bind and use a plan, and call `free_when_idle` after they release it.
    """

    def __init__(
        self,
        model: Callable[[int], Callable[[Request], Execution]],
        flow: Callable[[int], Flow],
        encode: Encode,
        memory_from: Callable[[Any, int], Memory],
    ) -> None:
        """`model`: the binder of the prepared model with that number. `flow`: where its executions queue.
        `memory_from`: maps what the client hands over.
        """
        self._model, self._flow, self._memory_from = model, flow, memory_from
        self._registered: dict[int, Memory | StatusError] = {}
        self._plans: dict[bytes, Plan] = {}
        self._is_ending = False
        self._executor = executor = CachedExecutor(RequestCodec(self._decode, encode, self._fetch), self._forget)
        self.lock, self.free_when_idle = executor.lock, executor.free_when_idle
        self.execute, self.answer = executor.execute, executor.answer
        self.failure, self.refuse, self.forget_plans = executor.failure, executor.refuse, executor.forget_plans

    @property
    def bound(self) -> int:
        """Number of plans."""
        return len(self._plans)

    def find(self, key: bytes) -> Plan | None:
        """The plan under that key. Under `lock`."""
        return self._plans.get(key)

    def bind(self, key: bytes, request: object) -> Plan:
        """Decodes, checks and binds a request; keeps the plan under `key`. Under `lock`. Raises Malformed, StatusError,
        and whatever the device raises.
        """
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan = self._executor.plan(request)
        if self._is_ending:
            plan.cancel()
        return plan

    def drop(self, plan: Plan) -> None:
        """Forgets a plan that may have been cancelled: the next request like it is bound anew."""
        with self.lock:
            self._plans = {key: other for key, other in self._plans.items() if other is not plan}
        self.free_when_idle()

    def manage(self, message: Message) -> None:
        """Registers or frees memory, without an answer: requests that use it get the error. Raises Malformed."""
        match message.body:
            case ["memory", int(slot), list(plain)] if len(message.fds) == 1:
                self.register(slot, self._mapped(plain, message.take_fds().pop()))
            case ["free_memory", *slots]:
                self.free_memory(checked_slots(slots))
            case _:
                raise Malformed("a message is execute, memory or free_memory, as the protocol has them")

    def note_lost(self, error: DescriptorsLost) -> None:
        """Requests that use the memory whose descriptor is lost get the error. Raises it if none would."""
        match Message(error.raw, []).body:
            case ["memory", int(slot), list()] if found := exhausted(error):
                self.register(slot, found)
            case _:
                raise error

    def register(self, slot: int, memory: Memory | StatusError) -> None:
        """Requests name this memory by `slot` from now on. An error is raised by each request that names the slot."""
        self._registered[slot] = memory

    def free_memory(self, slots: Sequence[int]) -> None:
        """The client has freed this memory. It stays mapped until no execution uses it."""
        for slot in slots:
            self._registered.pop(slot, None)
        self._executor.free_memory(slots)

    def stop(self) -> None:
        """Cancels running executions. From any thread."""
        self._is_ending = True  # set first: a plan that another thread binds meanwhile is cancelled there
        for plan in list(self._plans.values()):
            plan.cancel()

    def close(self) -> None:
        """Frees plans and memory. Nothing may run or be answered any more."""
        self._registered.clear()
        self._executor.close()

    def _decode(self, request: object) -> DecodedRequest:
        number, packet = decode_request(request)
        return DecodedRequest(packet, self._model(number), self._flow(number))

    def _fetch(self, slots: list[int]) -> list[Memory]:
        return [self._memory(slot) for slot in slots]

    def _memory(self, slot: int) -> Memory:
        match self._registered.get(slot):
            case Memory() as memory:
                return memory
            case None:
                raise InvalidArgument(f"no memory is registered as {slot}")
            case error:
                raise type(error)(f"the memory registered as {slot} cannot be used: {error}")

    def _forget(self, slots: frozenset[int] | None) -> frozenset[int]:
        self._plans = {key: p for key, p in self._plans.items() if slots is not None and not p.slots & slots}
        return frozenset()

    def _mapped(self, plain: list[Any], fd: int) -> Memory | StatusError:
        """The memory, or the error that its users will get."""
        try:
            return self._memory_from(plain, fd)
        except StatusError as error:
            return type(error)(str(error))  # a fresh one, without its traceback
