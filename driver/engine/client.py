"""One client in the engine: its models, bursts, lane and buffers."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from burst import (
    BurstOffer,
    GeneralFailure,
    InvalidArgument,
    Malformed,
    Memory,
    ResourceExhaustedTransient,
    StatusError,
)
from burst.channel import Channel, Message
from burst.datum import DATUM
from burst.exhaustion import with_room
from burst.run_queue import Flow, Ticket, waiters
from burst.server import check_queue
from burst.wire import VERSIONS
from driver.config import device_uid
from driver.deadlines import due
from driver.engine.binding import charge_thread, execution
from driver.engine.cache.compilations import CacheOwner, Declined
from driver.engine.client_descriptors import Descriptors, burst_trace, sent_model, to_read, trace_of
from driver.engine.device_memory import BufferTerms, LoadedModel, ManagedBuffers, ModelCharge
from driver.engine.joining import Joining
from driver.engine.lane import ClientLane, LaneOwner
from driver.engine.lane_reader import LaneReader
from driver.engine.ledger import PRICES, price
from driver.engine.memory_import import MemoryImporter, bring_pages
from driver.engine.open_burst import OpenBurst
from driver.engine.preparations import PreparationTime
from driver.engine.quota import Quota
from driver.engine.real_time import locked, priority
from driver.options import PRIORITIES
from driver.protocol.model_codec import handles_in
from driver.protocol.prepare_arguments import WIRE_LENGTH, PrepareArguments, SavedTerms
from driver.protocol.rpc import Reply, take_fd
from driver.protocol.stated_capabilities import stated_by, to_wire
from fmq import Descriptor, FmqError, LifePage
from fmq.region import checked_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from burst import Request
    from burst.execution import Execution
    from burst.run_queue import Application, FlowCounts
    from driver.engine.hints import BurstHints
    from driver.engine.ledger import Claim, Holder
    from driver.engine.models import SharedModel
    from driver.engine.process import Engine


_log = logging.getLogger(__name__)


_MOST_ROLES = 256  # per buffer
_MOST_REASON = 1000  # characters
_WORTH = 2**20  # bytes of temporaries that are worth binding a request again for
_FEW = 4  # plans that stay bound: a burst of depth 1 alternates between fewer requests than this
_TRACES_AT_ONCE = 16  # descriptors in one answer


class EngineClient:
    """The owner of what one client has made in the engine. All of it ends with the client's connection."""

    def __init__(self, engine: Engine, uid: int) -> None:
        """Count the client. Raise ResourceExhaustedTransient."""
        self._engine, self.uid, self._limits = engine, uid, engine.limits
        self.quota = Quota(engine.limits.client_bytes)  #: takes from `holder`, too
        is_stranger = uid != device_uid()
        self.importer = MemoryImporter(self.quota, engine.limits.file_seconds, is_stranger=is_stranger)
        self._enter(engine.application(uid))
        self._numbers = count(1)
        self._models: dict[int, LoadedModel] = {}
        self._buffers = ManagedBuffers(self.quota, engine.memory)
        self._bursts: set[OpenBurst] = set()
        self._lane: ClientLane | None = None
        self._is_real_time = engine.real_time.is_given
        self.handlers: dict[str, Callable[..., Reply]] = {
            "join": self.join,
            "spend": self.spend,
            "load": self.load,
            "restore": self.restore,
            "stage": self.stage,
            "free": self.free,
            "lane": self.lane,
            "burst": self.burst,
            "traces": self.traces,
            "census": self.census,
            "time_work": self.time_work,
            "real_time": self.real_time,
            "turns": self.turns,
            "ledger": self.ledger,
            "status": self.status,
            "capabilities": self.capabilities,
            "allocate": self.allocate,
            "allocate_all": self.allocate_all,
            "release": self.release,
            "copy_from": self.copy_from,
            "copy_to": self.copy_to,
            "copy": self.copy,
            "seal": self.seal,
            "unseal": self.unseal,
            "buffer_state": self.buffer_state,
        }

    @property
    def holder(self) -> Holder:
        """The ledger's record of what its application holds."""
        assert self.quota.holder
        return self.quota.holder

    def join(self, _: Message, name: str, is_declared: bool) -> Reply:
        """Make this client one of that application. The service calls it when the client says hello.

        A name that is not declared is no reason to refuse a client: beyond the limit it stays in the account's own.
        Raise InvalidArgument when the client has prepared a model, ResourceExhaustedTransient.
        """
        if self._models:
            raise InvalidArgument("hello comes before prepare: a client stays in its application")
        try:
            self._enter(self._engine.application(self.uid, name))
        except ResourceExhaustedTransient:
            if is_declared:
                raise
        return Reply()

    def spend(self, _: Message, figure: str, amount: float) -> Reply:
        """Add up what the service has spent on this client."""
        self.holder.spend(figure, amount)
        return Reply()

    def _enter(self, application: Application) -> None:
        before, self.quota.holder = (
            self.quota.holder,
            self._engine.ledger.account(self.uid).application(application.name),
        )
        try:
            self._claim = self.quota.take("close connections", **price("client"))
        except ResourceExhaustedTransient:
            self.quota.holder = before
            raise
        self._application = application
        self._flows = [Flow(application, priority) for priority in range(len(PRIORITIES))]

    def load(self, message: Message, file: bytes, takes: list[Any], where: list[Any], *plain: object) -> Reply:
        """Prepare the model in the first descriptors; answer its number, what that takes at least, and why it was not
        cached, if it was not.

        `file`: the digest of the file that it is, which the service has computed; b"" for others. `takes`: the
        arguments of its `PreparationTime`.

        Cache files follow if the arguments say so, then memory for a trace if the client wants one.
        """
        self._check_models()
        arguments, charge = PrepareArguments.from_wire(*plain), ModelCharge(self.quota, len(handles_in(where)))
        with Descriptors(message.take_fds()) as fds, due(arguments.deadline):
            own = 1 + len(handles_in(where))
            arguments = arguments._replace(trace=trace_of(fds, own + max(0, sum(arguments.cache_counts or ()))))
            time = PreparationTime(*takes)
            shared = self._engine.prepare(self.holder, fds, where, arguments, charge.take, takes=time, file=file)
            declined = [self._save(shared, arguments, fds)] if arguments.cache_counts else []
        return Reply([self._loaded_as(shared, arguments, charge), time.found, *declined])

    def _save(self, shared: SharedModel, arguments: PrepareArguments, fds: list[int]) -> str:
        """Cache the model; return why not, if that fails. A failure is no reason not to use the model."""
        try:
            self._engine.compilations.check(arguments.cache_counts, arguments.cache_token, fds)
            owner = CacheOwner(self.uid, arguments.cache_token)
            terms = SavedTerms(arguments.preference, arguments.priority, shared.found)
            shared.save(self._engine.compilations.saving(owner, fds, terms))
            shared.keep_for(owner)
        except (InvalidArgument, Malformed, Declined, OSError) as error:
            _log.warning("a compilation was not cached: %s", error)
            return str(error) or type(error).__name__
        return ""

    def restore(self, message: Message, takes: list[Any], *plain: object) -> Reply:
        """Make the model in these cache files ready; answer as `load`, with the file's digest, preference and priority.

        A preference or a priority that is None is that of the saved model. A trace may follow the files.
        A client that has the model in sealed memory says where, after the other arguments; its descriptors come first.
        """
        more: Any = plain[WIRE_LENGTH:]
        self._check_models()
        arguments = PrepareArguments.from_wire(*plain[:WIRE_LENGTH], restores=True)
        charge = ModelCharge(self.quota)
        with Descriptors(message.take_fds()) as fds, due(arguments.deadline):
            sent = sent_model(fds, *more) if more else None
            arguments = arguments._replace(trace=trace_of(fds, sum(arguments.cache_counts or ())))
            given = self._engine.compilations.check(arguments.cache_counts, arguments.cache_token, fds)
            owner = CacheOwner(self.uid, arguments.cache_token)
            arguments, time = self._as_saved(arguments, owner), PreparationTime(*takes)
            read = partial(self._engine.compilations.restored, owner, given, fds, sent)
            try:
                shared = self._engine.restore(self.holder, read, arguments, charge.take, takes=time)
                shared.keep_for(owner)
            except StatusError:
                raise
            except Exception as error:
                raise GeneralFailure(f"the device cannot restore the model: {error}") from error
        number = self._loaded_as(shared, arguments, charge)
        return Reply([number, time.found, shared.file, arguments.preference, arguments.priority])

    def _as_saved(self, arguments: PrepareArguments, owner: CacheOwner) -> PrepareArguments:
        """Return the arguments with the saved model's preference and priority where the client gives none."""
        terms = self._engine.compilations.terms(owner) if any(arguments.takes_saved) else None
        if terms is None:
            return arguments
        is_preference_saved, is_priority_saved = arguments.takes_saved
        preference = terms.preference if is_preference_saved else arguments.preference
        return arguments._replace(
            preference=preference, priority=terms.priority if is_priority_saved else arguments.priority
        )

    def _check_models(self) -> None:
        self._limits.check("client_models", len(self._models), "close prepared models")

    def _loaded_as(self, shared: SharedModel, arguments: PrepareArguments, charge: ModelCharge) -> int:
        charge.take_decoded(shared, self._engine.pace)
        number, priority = next(self._numbers), arguments.priority
        joining = Joining(shared.joiner(arguments.batch), self._flows[priority]) if arguments.batch else None
        self._models[number] = LoadedModel(number, shared, priority, charge, joining=joining)
        return number

    def stage(self, _: Message, number: int) -> Reply:
        """Answer how often an improved compilation has replaced a prepared model."""
        return Reply([self._loaded(number).shared.stage])

    def free(self, _: Message, *numbers: int) -> Reply:
        """Drop prepared models and the requests bound to them. An open burst keeps its model.

        Raise InvalidArgument for what is no number.
        """
        if not all(type(number) is int for number in numbers):
            raise InvalidArgument(f"free{numbers!r:.80}: prepared models are named by numbers")
        for number in numbers:
            self._models.pop(number, None)
        self._forget_lane_plans()
        return Reply()

    def _forget_lane_plans(self) -> None:
        if lane := self._lane:
            lane.forget_plans()

    def model(self, number: int) -> Callable[[Request], Execution]:
        """Return a function that binds requests to a prepared model. Raise InvalidArgument."""
        return self._binder(self._loaded(number))

    def _binder(self, loaded: LoadedModel) -> Callable[[Request], Execution]:
        def bind(request: Request) -> Execution:
            self._engine.check_available()
            claim = self._plan_claim(loaded)
            bring_pages(request)
            bound = execution(loaded, request, self._buffers, self._engine.pace.for_others)
            if self._engine.rests or self._is_large() or any(worker.bound >= _FEW for worker in self.workers()):
                self._engine.idle.begin()
            bound.claim = claim  # given back with the plan
            return bound

        return bind

    def _plan_claim(self, loaded: LoadedModel) -> Claim:
        """Claim one more plan. Raise StatusError."""
        footprint = loaded.shared.footprint
        nbytes = PRICES["plan"]["bytes"] + (footprint.plan if footprint else 0)
        return with_room(partial(self.quota.charge, nbytes), self.forget_plans)

    def flow(self, number: int) -> Flow:
        """Return the flow in which executions of a prepared model queue. Raise InvalidArgument."""
        return self._flows[self._loaded(number).priority]

    def turns(self, _: Message) -> Reply:
        """Answer slots, waiting executions, the account's weight, the application, and counts by priority."""
        weight, name = self._application.share.weight, self._application.name
        return Reply([self._engine.queue.slots, waiters(), weight, name, self.counts()])

    def ledger(self, _: Message, start: int) -> Reply:
        """Answer a page of what applications hold in this process: its own account's; root and the device's see all."""
        return Reply(self._engine.ledger.report(self._visible_uid).page(start))

    def status(self, _: Message) -> Reply:
        """Answer the device's state and its reason."""
        state, reason = self._engine.device.status
        return Reply([state, str(reason)[:_MOST_REASON]])

    def capabilities(self, _: Message) -> Reply:
        """Answer what the driver states about the device's speed, or nothing. Raise GeneralFailure."""
        return Reply(to_wire(stated_by(self._engine.device)))

    def counts(self) -> list[FlowCounts]:
        """Return counts of its executions, by priority."""
        return [flow.counts() for flow in self._flows]

    def _loaded(self, number: int) -> LoadedModel:
        try:
            return self._models[number]
        except (KeyError, TypeError):
            raise InvalidArgument(
                f"prepared model {number!r:.20}: this client has none with that number; it may have been closed"
            ) from None

    def allocate(
        self,
        _: Message,
        dimensions: list[int],
        numbers: list[int],
        inputs: list[Any],
        outputs: list[Any],
        in_place: bool = False,
    ) -> Reply:
        """Allocate a buffer for roles [model index, input or output index, frequency]; answer its token. `in_place`:
        one request may name it on both sides.
        """
        return self.allocate_all(_, [dimensions, numbers, inputs, outputs, in_place])

    def allocate_all(self, _: Message, *rows: list[Any]) -> Reply:
        """Allocate a buffer for each list of arguments of `allocate`, all or none; answer their tokens."""
        return Reply([buffer.token for buffer in self._buffers.allocate_all([self._terms(*row) for row in rows])])

    def _terms(
        self, dimensions: list[int], numbers: list[int], inputs: list[Any], outputs: list[Any], in_place: bool = False
    ) -> BufferTerms:
        _check_dimensions(dimensions)
        if len(numbers) + len(inputs) + len(outputs) > _MOST_ROLES:
            raise InvalidArgument(f"{len(inputs) + len(outputs)} roles; at most {_MOST_ROLES} with their models")
        models = [self._loaded(number) for number in numbers]
        return BufferTerms(tuple(dimensions), models, inputs, outputs, in_place=bool(in_place))

    def release(self, _: Message, *tokens: int) -> Reply:
        """Free buffers and the plans bound to them."""
        for token in tokens:
            self._buffers.release(token)
        self.forget_plans()
        return Reply()

    def forget_plans(self) -> None:
        """Have requests bound anew: what they are bound to has changed."""
        self._forget_lane_plans()
        for burst in list(self._bursts):
            burst.forget_plans()

    def workers(self) -> list[OpenBurst | ClientLane]:
        """Return what executes for it: its lane and bursts."""
        return [*([self._lane] if self._lane else []), *self._bursts]

    def copy_from(self, message: Message, token: int, dimensions: list[int], plain: object) -> Reply:
        """Copy the memory in the descriptor into a buffer."""
        memory = self._whole(plain, take_fd(message))
        self._buffers[token].copy_from(memory, tuple(dimensions))
        return Reply()

    def _whole(self, plain: object, fd: int) -> Memory:
        """Return memory that will be copied as a whole."""
        memory = self.importer(plain, fd)
        if memory.is_file:
            memory.bring_pages(0, memory.nbytes)
        return memory

    def copy_to(self, message: Message, token: int, plain: object) -> Reply:
        """Copy the value of a buffer into the memory in the descriptor."""
        self._buffers[token].copy_to(self._whole(plain, take_fd(message)))
        return Reply()

    def copy(self, _: Message, source: int, target: int) -> Reply:
        """Copy the value of a buffer into another one."""
        self._buffers[target].copy(self._buffers[source])
        return Reply()

    def seal(self, message: Message, token: int, plain: object) -> Reply:
        """Copy the value of a buffer into the memory in the descriptor; answer the digest that `unseal` asks for."""
        return Reply([self._buffers[token].seal(self._whole(plain, take_fd(message)), self.uid)])

    def unseal(self, message: Message, token: int, dimensions: list[int], digest: bytes, plain: object) -> Reply:
        """Copy a sealed value into a buffer. Raise GeneralFailure for another one."""
        _check_dimensions(dimensions)
        memory = self._whole(plain, take_fd(message))
        self._buffers[token].unseal(memory, tuple(dimensions), digest, self.uid)
        return Reply()

    def buffer_state(self, _: Message, token: int) -> Reply:
        """Answer the dimensions of a buffer, and whether it has no value."""
        return Reply(self._buffers[token].state.to_wire())

    def holders(self) -> list[OpenBurst | ClientLane]:
        """Return those whose plans are worth dropping: many plans, or large temporaries."""
        most = 0 if self._is_large() else _FEW
        return [worker for worker in self.workers() if worker.bound > most]

    def _is_large(self) -> bool:
        return self.quota.taken >= _WORTH

    def lane(self, _: Message) -> Reply:
        """Open a socket of the client's lane. Each executes one request in turn at a time, and launches any number."""
        if self._lane is None:
            self._lane = ClientLane(self._lane_owner())
        lane, remedy = self._lane, "make fewer calls at once"
        self._limits.check("client_connections", len(lane.sockets), remedy)
        with self._new_connection(remedy) as (near, end, opened):
            LaneReader(near, lane, end).start()
            return opened()

    @contextmanager
    def _new_connection(self, remedy: str) -> Iterator[tuple[Channel, Callable[[], None], Callable[[], Reply]]]:
        """Return a channel past the service, what its end frees, and a function that makes the answer.

        The answer hands the channel and a life page over. All of it ends unless that function is called last.

        Raise ResourceExhaustedTransient.
        """
        with ExitStack() as undo, ExitStack() as held:
            held.enter_context(self.quota.take(remedy, **price("lane socket")))
            life = LifePage()
            held.callback(life.close)
            near, far = Channel.pair()
            undo.enter_context(near)
            with far:
                fds = undo.enter_context(Descriptors([os.dup(far.fileno())]))
            fds.append(os.dup(life.fd))
            end = undo.enter_context(held.pop_all()).close

            def opened() -> Reply:
                undo.pop_all()
                return Reply([], fds)

            yield near, end, opened

    def _lane_owner(self) -> LaneOwner:
        return LaneOwner(
            bind=self.model,
            model=lambda number: self._loaded(number).model,
            flow=self.flow,
            memory_from=self.importer,
            take=self.quota.take,
            enter=partial(charge_thread, self.quota),
            slots=self._engine.queue.slots,
            limits=self._limits,
        )

    def burst(
        self, message: Message, number: int, requests: object, results: object, spin: float | str, versions: list[int]
    ) -> Reply:
        """Configure a burst. Descriptors: two queues, the callback, the context, and a trace if the client wants one.

        Answers the wire version, and a life page of this process: the queues are in the client's memory, and so may
        not have a word of ours.
        """
        if len(message.fds) not in {4, 5} or not (spin == "adaptive" or 0 <= spin <= 10):  # type: ignore[operator]
            raise Malformed('a burst needs 4 or 5 descriptors, and 0 to 10 seconds of spinning or "adaptive"')
        spoken = {*versions} & {*VERSIONS}
        if not spoken:
            raise InvalidArgument(f"versions {versions!r:.80}: this device speaks {list(VERSIONS)}")
        loaded = self._loaded(number)
        self._limits.check("client_bursts", len(self._bursts), "close bursts")
        with ExitStack() as undo:
            callback = Channel.from_fd(message.fds.pop(2))
            undo.callback(callback.close)
            context = Channel.from_fd(message.fds.pop(2))
            undo.callback(context.close)
            context.refuse_descriptors()  # a thread of all clients reads it
            try:
                queues = self._queue(requests, message), self._queue(results, message)
            except FmqError as error:
                is_own = self.uid == device_uid()
                remedy = "" if is_own else '; a client of another account opens it with memory="memfd"'
                raise GeneralFailure(f"the burst's queues cannot be used: {error}{remedy}") from error
            longest = DATUM * max(queues[0].capacity, queues[1].capacity)  # the listener has a buffer for such a packet
            claim = self.quota.take("close bursts", **price("burst", bytes=longest))
            undo.callback(claim.give_back)
            trace = burst_trace(message.fds, loaded.priority, self._application.name)
            life = LifePage()
            undo.callback(life.close)
            told = os.dup(life.fd)
            undo.callback(os.close, told)
            burst = OpenBurst(self._engine.device.name, context, trace, life)
            offer = BurstOffer(
                requests=queues[0],
                results=queues[1],
                callback=callback,
                bind=self._binder(loaded),
                bind_to=lambda prepared: self._binder(loaded.served_by(prepared)),
                trace=trace,
                version=max(spoken),
                spin=spin,
                priority=PRIORITIES[loaded.priority],
                ticket=Ticket(self._flows[loaded.priority]),
                on_end=burst.ended,
                life=life,
                memory_from=locked(self.importer) if self._is_real_time else self.importer,
                real_time=priority() if self._is_real_time else 0,
                around=self._engine.latency.around(loaded.shared.bursts.preference),
            )
            self._engine.watch_threads(loaded.shared, self.uid)
            version = burst.configure(offer, loaded.prepared, spoken)
            self._start(burst, loaded.shared.bursts, claim)
            undo.pop_all()
        return Reply([version], [told])

    def _queue(self, wire: object, message: Message) -> Descriptor:
        """Return the queue in a message's first descriptor. Raise ResourceExhaustedPersistent, InvalidDescriptor."""
        is_stranger = self.uid != device_uid()  # within the account: memory="posix", and `guard` turns it into zeros
        queue = Descriptor.from_wire(wire, [message.fds.pop(0)], sealed=is_stranger, announces=False)
        for fd in queue.fds if is_stranger else ():
            checked_size(fd, None, sealed=True)  # here, whichever process of the device attaches it
        self._limits.check_size("burst_elements", queue.capacity, "use shorter queues")
        check_queue(queue)
        return queue

    def traces(self, _: Message, start: int) -> Reply:
        """Answer traces of bursts, read-only: a page of them from number `start` on, and how many there are.

        Only those of the client's own account, because the holder of a memfd can open it again for writing. The
        device's account and root see all.
        """
        found = self._engine.traces_of(self._visible_uid)
        return Reply([len(found)], [to_read(memory) for memory in found[start : start + _TRACES_AT_ONCE]])

    @property
    def _visible_uid(self) -> int | None:
        """The account whose traces and figures the client may read; None: all accounts."""
        return None if self.uid in {0, device_uid()} else self.uid

    def census(self, _: Message) -> Reply:
        """Answer counts of the clients and bursts that it may see, in shared memory, and this process's life page."""
        census = self._engine.census(self._visible_uid)
        return Reply([], [to_read(census.memory), os.dup(census.life.fd)])

    def time_work(self, _: Message, seconds: float) -> Reply:
        """Have the engine time the work of the bursts that the client may see."""
        return Reply([self._engine.time_work(seconds, self._visible_uid)])

    def real_time(self, _: Message) -> Reply:
        """Serve the bursts that it opens from now on in real time. Raise InvalidArgument."""
        self._engine.real_time.check_asked()
        self._is_real_time = True
        return Reply()

    def _start(self, burst: OpenBurst, hints: BurstHints, claim: Claim) -> None:
        engine, is_registered = self._engine, False

        def register() -> None:
            nonlocal is_registered
            is_registered = True
            engine.traces[burst] = self.uid, burst.trace.memory
            self._bursts.add(burst)
            engine.burst_began(hints.preference)
            engine.note(self.uid, changes=1)
            engine.contexts.add(burst.context, burst.on_message, burst.stop)

        hints.began()
        try:
            burst.start(register, partial(self._burst_ended, hints, claim))
        except Exception:
            if not is_registered:
                hints.ended()
            raise

    def _burst_ended(self, hints: BurstHints, claim: Claim, burst: OpenBurst) -> None:
        engine = self._engine
        with ExitStack() as end:  # all of it, whatever fails; the last one first
            end.callback(claim.give_back)
            end.callback(hints.ended)
            end.callback(engine.note, self.uid, changes=1)
            end.callback(engine.burst_ended, hints.preference)
            end.callback(burst.context.close)
            end.callback(engine.contexts.discard, burst.context)
            end.callback(self._bursts.discard, burst)
            engine.traces.pop(burst, None)

    def close(self) -> None:
        """End everything: the client is gone."""
        self._engine.clients.discard(self)
        with ExitStack() as end:  # all of it, whatever fails
            # The handlers refer to this object: break the cycle, as no garbage is collected while a burst is open.
            for held in (self._models, self._buffers, self.handlers):
                end.callback(held.clear)
            for burst in list(self._bursts):
                end.callback(burst.stop)
            lane, self._lane = self._lane, None
            if lane:
                end.callback(lane.stop)
            end.callback(self._claim.give_back)
            self._engine.note(self.uid)


def _check_dimensions(dimensions: list[int]) -> None:
    if not all(type(d) is int and 0 <= d < 2**32 for d in dimensions):
        raise Malformed(f"dimensions={dimensions!r:.80}: each must be an integer of 32 bits, without a sign")
