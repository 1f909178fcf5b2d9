"""The protocol over gRPC: messages to calls and back. `GrpcFront` needs no network, `GrpcDoor` is a server.

A request runs in a thread of the server's, from its message to its answer, because a thread that waits in C for a burst
costs no other anything: on two processors this answered 1.8 times as many empty requests as `grpc.aio`, at the same
latency.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from driver.gateways.oip import messages
from driver.gateways.oip.datatypes import DATATYPES
from driver.gateways.oip.decoupled import steps_wanted
from driver.gateways.oip.inference import GivenTensor, InferCall, region_slice, time_and_priority, wanted_tensor
from driver.gateways.oip.message_memory import UnclaimedMemory, message_bytes
from driver.gateways.oip.unread_answers import UnreadAnswer, UnreadAnswers
from driver.gateways.oip.unsent_answers import UnsentAnswers
from driver.gateways.refusal import invalid, refusal_of
from driver.gateways.request_memory import OF_ONE, SMALL, MemoryClaim, RequestMemory
from driver.service.http_connections import machine_of
from driver.service.peer_limiter import PeerLimiter, of_all

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from driver.gateways.oip.inference import AnsweredTensor, InferAnswer
    from driver.gateways.oip.service import InferenceService
    from driver.service.peer_limiter import PeerVisit

_LOG = logging.getLogger("burst.oip")
_FINAL = "triton_enable_empty_final_response"
_SMALL, _MOST_KNOWN = 4096, 64
_YIELDS = 0.1  # of the patience has a message until another call of its machine may take its place
_EVICTED = "other calls need this one's place or memory, because its request was not there: send it again"
_UNREAD = "the answer was not read in time"
_UNREAD_EVICTED = "answers that are not read take too much memory, this one among them: read it as it comes"
_LOOK = 0.25  # seconds between two looks at what calls wait for, and at this process's memory
_FEW = 8  # looks
_COPIES = 2  # of an answer that is not read: Python's and gRPC's
PEER = "burst-peer"
"""The metadata in which a door in front of this one says whose call it is."""
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class DoorLimits(NamedTuple):
    """The limits on what one client's machine, or one account, may use up at an address. All together: half as much
    again.

    message: bytes of a request or an answer. requests: at once. connections: at once. streams: of those requests, how
    many may be streams. patience: seconds until a request that has begun is complete, and for an answer to be read.
    slowest: to these is added the time of so many bytes a second. idle: seconds that a stream may have no request, and
    a connection no call. incomplete: bytes, of all together, of messages over gRPC that have not come whole, and of
    answers that are not read.
    """

    message: int = 64 << 20
    requests: int = 64
    connections: int = 256
    streams: int = 16
    patience: float = 30.0
    slowest: int = 1 << 20
    idle: float = 300.0
    incomplete: int = OF_ONE

    def time_of(self, nbytes: int) -> float:
        """Return the seconds that so many bytes of a request or an answer may take."""
        return self.patience + nbytes / self.slowest


class KnownCall(NamedTuple):
    """A request that was decoded before, and its parameters."""

    call: InferCall
    parameters: dict[str, Any]


class GrpcFront:
    """Decodes requests, calls the service, encodes what it says. Any thread."""

    def __init__(self, service: InferenceService) -> None:
        its = service
        self._service, self.memory, self.is_traced = its, RequestMemory(), its.is_traced
        self._known: dict[bytes, KnownCall] = {}
        self._methods: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda _: its.server_live(),
            "ServerReady": lambda _: its.server_ready(),
            "ModelReady": lambda r: its.model_ready(r.name, r.version),
            "ServerMetadata": lambda _: its.server_metadata(),
            "ModelMetadata": lambda r: its.model_metadata(r.name, r.version),
            "ModelConfig": lambda r: {"config": its.model_config(r.name, r.version)},
            "ModelStatistics": lambda r: its.model_statistics(r.name, r.version),
            "RepositoryIndex": lambda r: its.repository_index(ready=r.ready),
            "RepositoryModelLoad": lambda r: its.load(r.model_name, r.parameters),
            "RepositoryModelUnload": lambda r: its.unload(r.model_name),
            "SystemSharedMemoryStatus": lambda r: {
                "regions": {row["name"]: row for row in its.region_status(r.name)},
            },
            "SystemSharedMemoryRegister": lambda r: its.register_region(r.name, r.key, r.offset, r.byte_size),
            "SystemSharedMemoryUnregister": lambda r: its.unregister_region(r.name),
            "CudaSharedMemoryStatus": lambda r: {"regions": {row["name"]: row for row in its.cuda_status(r.name)}},
            "CudaSharedMemoryRegister": lambda r: its.register_cuda(r.name),
            "CudaSharedMemoryUnregister": lambda _: its.unregister_cuda(),
        }
        self._decoders = {each.name: messages.message(each.request).FromString for each in messages.METHODS}
        self._answers = {each.name: messages.message(each.response) for each in messages.METHODS}

    def answer(
        self, method: str, packet: bytes, left: float | None = None, *, account: Hashable = None, trace: str = ""
    ) -> bytes:
        """Return the answer to a request, both encoded. `left`: seconds that the client waits. `account`: whose memory
        it takes. `trace`: the client's traceparent. Raise Refusal.
        """
        is_infer = method == "ModelInfer"
        with self._claim(packet, account, is_infer=is_infer):
            if is_infer:
                call = self._call(packet, left)
                call = call._replace(traceparent=trace) if trace else call
                return _encoded(_answer_message(self._service.infer(call)))
            request = self._decoded(method, packet)
            return _encoded(self._answers[method](**self._methods[method](request)))

    @contextmanager
    def _claim(self, packet: bytes, account: Hashable, *, is_infer: bool = True) -> Iterator[None]:
        """Hold the memory that a request can take while it is answered. Raise Refusal."""
        with MemoryClaim(self.memory, account) as claim:
            if len(packet) > SMALL:
                claim.wait_for(message_bytes(packet, is_infer=is_infer))
            yield

    def _call(self, packet: bytes, left: float | None) -> InferCall:
        """Decode once what a client that keeps its tensors in shared memory sends each time."""
        is_small = len(packet) <= _SMALL
        if is_small and (known := self._known.get(packet)):
            deadline, priority = time_and_priority(known.parameters, left)
            return known.call._replace(deadline=deadline, priority=priority)
        request = self._decoded("ModelInfer", packet)
        call = _call_of(request, left)
        if is_small and all(each.place for each in call.given):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[packet] = KnownCall(call, _plain(request.parameters))
        return call

    def stream_answers(self, packet: bytes, left: float | None = None, *, account: Hashable = None) -> Iterator[bytes]:
        """Yield the answers to a request of ModelStreamInfer: a refusal is one, too."""
        request = None
        try:
            with self._claim(packet, account):
                request = self._decoded("ModelStreamInfer", packet)
                answers = self._service.answers(_call_of(request, left))
                found = _stream_message(request, next(answers))
            with closing(answers):
                yield found
                for answer in answers:
                    yield _stream_message(request, answer)
        except Exception as error:  # noqa: BLE001 (the stream goes on)
            told = messages.ModelStreamInferResponse(error_message=refusal_of(error, _note).text)
            if request is not None:
                told.infer_response.id = request.id
                _note_final(told.infer_response, request, None)
            yield _encoded(told)

    def _decoded(self, method: str, packet: bytes) -> Any:
        try:
            return self._decoders[method](packet)
        except (DecodeError, UnicodeDecodeError, ValueError):
            raise invalid(f"the message is not a {method} request of the Open Inference Protocol") from None


def _metadata(context: Any, name: str) -> str:
    """Return what a call's metadata has by that name; "" where it has nothing."""
    found = next((value for key, value in context.invocation_metadata() if key == name), "")
    return found if isinstance(found, str) else ""


def _call_of(request: Any, left: float | None) -> InferCall:
    deadline, priority = time_and_priority(_plain(request.parameters), left)
    wanted = [wanted_tensor(each.name, _plain(each.parameters), is_binary=True) for each in request.outputs]
    given = _given(request.inputs, request.raw_input_contents)
    return InferCall(
        request.model_name,
        request.model_version,
        request.id,
        given,
        wanted=wanted or None,
        deadline=deadline,
        priority=priority,
        most=steps_wanted(_plain(request.parameters)),
    )


def _given(inputs: Iterable[Any], raw: Sequence[bytes]) -> list[GivenTensor]:
    """Raw contents belong to the inputs that are not in shared memory, in their order. Raise Refusal."""
    found, taken = [], 0
    for each in inputs:
        what = f"input {each.name!r:.80}"
        place = region_slice(_plain(each.parameters), what) if each.parameters else None
        data, values = None, None
        if place is None and raw:
            if taken == len(raw):
                raise invalid(f"{what} has no raw contents: there are {taken}")
            data, taken = raw[taken], taken + 1
        has_values = each.HasField("contents")
        if has_values and (place or raw):
            raise invalid(f"{what} has its values twice: as contents, and as raw contents or in shared memory")
        if has_values:
            values = _values(each, what)
        elif place is None and not raw:
            raise invalid(f"{what} has no data")
        found.append(GivenTensor(each.name, each.datatype, tuple(each.shape), data, values=values, place=place))
    if taken != len(raw):
        raise invalid(f"there are {len(raw)} raw contents for {taken} inputs")
    return found


def _values(tensor: Any, what: str) -> Sequence[Any]:
    """Return the one list of values that a tensor has. Raise Refusal."""
    kind = _contents_of(tensor.datatype)
    fields = [field.name for field, _ in tensor.contents.ListFields()]
    if kind and (len(fields) > 1 or (fields and fields[0] != kind)):
        raise invalid(f"{what} of type {tensor.datatype!r:.20} has values in {', '.join(fields)}, not in {kind}")
    return getattr(tensor.contents, fields[0]) if fields else ()


def _contents_of(datatype: str) -> str | None:
    return DATATYPES[datatype].contents or None if datatype in DATATYPES else None


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    if not parameters:
        return {}
    found = {}
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        found[name] = getattr(value, choice) if choice else None
    return found


def _answer_message(answer: InferAnswer) -> Any:
    message = messages.ModelInferResponse(model_name=answer.model, model_version=answer.version, id=answer.id)
    raw = []
    for each in answer.tensors:
        tensor = message.outputs.add(name=each.name, datatype=each.kind.name, shape=each.shape)
        if each.place:
            _say_place(tensor.parameters, each)
        else:
            raw.append(each.packed())
    message.raw_output_contents.extend(raw)
    return message


def _stream_message(request: Any, answer: InferAnswer) -> bytes:
    found = _answer_message(answer)
    _note_final(found, request, answer.is_last)
    return _encoded(messages.ModelStreamInferResponse(infer_response=found))


def _note_final(message: Any, request: Any, is_last: bool | None) -> None:
    """Say whether it is the last answer to the request, as Triton does: of several always, of one if asked."""
    if is_last is not None or request.parameters[_FINAL].bool_param:
        message.parameters["triton_final_response"].bool_param = is_last is not False


def _say_place(parameters: Any, each: AnsweredTensor) -> None:
    assert each.place
    parameters["shared_memory_region"].string_param = each.place.region
    parameters["shared_memory_byte_size"].int64_param = each.place.nbytes
    if each.place.offset:
        parameters["shared_memory_offset"].int64_param = each.place.offset


def _encoded(message: Any) -> bytes:
    found: bytes = message.SerializeToString()
    return found


def _note(error: Exception) -> None:
    _LOG.error("a request failed", exc_info=error)


class CallTerms(NamedTuple):
    """How long a call may have no request, after how long it yields its place to another one of its machine, and what
    its client is told where there is none for it, and where its time is over.
    """

    seconds: float
    yields_in: float
    refused: str
    overdue: str

    @classmethod
    def of_unary(cls, limits: DoorLimits) -> CallTerms:
        """Return those of a call with one request, of which the library tells nothing before it is whole."""
        seconds = limits.time_of(limits.message)
        told = f"the request did not come whole within {seconds:g} s: send large tensors in shared memory"
        refused = f"{limits.requests} requests run; send this one later"
        return cls(seconds, _YIELDS * limits.patience, refused, told)

    @classmethod
    def of_stream(cls, limits: DoorLimits) -> CallTerms:
        """Return those of a call with any number of requests."""
        told = f"no request came for {limits.idle:g} s: "
        refused = f"{limits.streams} streams are open; end one, or use ModelInfer"
        return cls(limits.idle, limits.patience, refused, told + "open a stream again for the next request")


class Credentials(NamedTuple):
    """Paths of PEM files for TLS."""

    certificate: str
    key: str


class GrpcDoor:
    """A gRPC server at one address."""

    def __init__(
        self,
        service: InferenceService,
        address: str,
        limits: DoorLimits,
        credentials: Credentials | None = None,
        *,
        is_behind: bool = False,
    ) -> None:
        """Listen at "HOST:PORT" or "unix:PATH"; `port` says which. `is_behind`: another door, which is trusted, has
        this one's clients. Raise OSError where it cannot.
        """
        self._is_behind = is_behind
        self._front, self._limits = GrpcFront(service), limits
        self._unary_terms, self._stream_terms = CallTerms.of_unary(limits), CallTerms.of_stream(limits)
        self._unread, self._unsent = UnreadAnswers(), UnsentAnswers()
        self._calls, self._streams = PeerLimiter.of_one(limits.requests), PeerLimiter.of_one(limits.streams)
        # A thread for each request, and as many for those that are refused or evicted.
        most = 2 * of_all(limits.requests)
        threads = ThreadPoolExecutor(most, thread_name_prefix="burst-oip")
        self._server = grpc.server(threads, options=_options(limits), maximum_concurrent_rpcs=most, compression=None)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(messages.SERVICE, self._handlers()),)
        )
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                pair = _contents(credentials.key), _contents(credentials.certificate)
                self.port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
        except RuntimeError as error:
            raise OSError(f"cannot listen at {address}: {error}") from error
        self._unclaimed = UnclaimedMemory(self._front.memory, limits.incomplete)
        self._with_answers = self._beyond = 0  #: looks since answers took memory, and at which there was too little
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._end_overdue, name="burst-oip-overdue", daemon=True)

    def _handlers(self) -> dict[str, Any]:
        found = {}
        for method in messages.METHODS:
            if any(method.streams):
                found[method.name] = grpc.stream_stream_rpc_method_handler(self._stream)
            else:  # with an iterator of requests, for a handler that is given its request waits for it without an end
                found[method.name] = grpc.stream_unary_rpc_method_handler(partial(self._unary, method.name))
        return found

    def begin(self) -> None:
        """Serve clients from now on."""
        self._server.start()
        self._thread.start()

    def _unary(self, method: str, packets: Iterator[bytes], context: Any) -> bytes:
        with self._entered(self._calls, context, self._unary_terms) as visit:
            packet = next(packets, b"")  # of a call that ends without a message, as if it were an empty one
            visit.work()
            try:
                trace = _metadata(context, "traceparent") if self._front.is_traced else ""
                answer = self._front.answer(
                    method, packet, context.time_remaining(), account=visit.account, trace=trace
                )
            except Exception as error:  # noqa: BLE001 (told to the client)
                refusal = refusal_of(error, _note)
                context.abort(_CODES[refusal.code.value[0]], refusal.text)
                raise AssertionError from None  # abort has raised
            unread = self._note_unread(context, visit.account, len(answer))
            if not context.add_callback(partial(self._unread.discard, unread)):
                self._unread.discard(unread)
            return answer

    def _stream(self, packets: Iterator[bytes], context: Any) -> Iterator[bytes]:
        terms = self._stream_terms
        with self._entered(self._calls, context, terms) as call, self._entered(self._streams, context, terms) as stream:
            for packet in packets:
                call.work()
                stream.work()
                for answer in self._front.stream_answers(packet, context.time_remaining(), account=call.account):
                    unread = self._note_unread(context, call.account, len(answer))
                    try:
                        yield answer  # until the client has read it
                    finally:
                        self._unread.discard(unread)
                call.wait(terms.seconds, yields_in=terms.yields_in)
                stream.wait(terms.seconds, yields_in=terms.yields_in)

    def _note_unread(self, context: Any, account: Hashable, nbytes: int) -> UnreadAnswer:
        def end(*, is_evicted: bool) -> None:
            self._unsent.note(context.peer())
            if is_evicted:
                _end(context, grpc.StatusCode.RESOURCE_EXHAUSTED, _UNREAD_EVICTED)
            else:
                _end(context, grpc.StatusCode.DEADLINE_EXCEEDED, _UNREAD)

        return self._unread.add(account, _COPIES * nbytes, self._limits.time_of(nbytes), end)

    @contextmanager
    def _entered(self, limiter: PeerLimiter, context: Any, terms: CallTerms) -> Iterator[PeerVisit]:
        """Count a call that waits for its message. It is refused if there is no place for it."""
        machine = _machine_of(self._peer(context))
        visit = limiter.enter(machine, context.cancel)
        if visit is None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, terms.refused)
            raise AssertionError  # abort has raised

        def end() -> None:
            if visit.is_evicted:
                _end(context, grpc.StatusCode.RESOURCE_EXHAUSTED, _EVICTED)
            else:
                _end(context, grpc.StatusCode.DEADLINE_EXCEEDED, terms.overdue)

        visit.end = end
        visit.wait(terms.seconds, yields_in=terms.yields_in)
        try:
            yield visit
        finally:
            limiter.leave(visit)
            visit.end = _nothing  # no cycle: gRPC counts a call until Python has collected it

    def _peer(self, context: Any) -> str:
        said = _metadata(context, PEER) if self._is_behind else ""
        return said or str(context.peer())

    def _end_overdue(self) -> None:
        """Cancel RPCs whose client sends no message, or leaves an answer unread: they would keep memory and a
        thread.
        """
        while not self._end.wait(_LOOK):
            self._bound_memory()
            ended = self._calls.end_overdue() + self._streams.end_overdue() + self._unread.end_overdue()
            if hung_up := self._unsent.hang_up():
                _LOG.warning("%d connections have ended: their clients read nothing", hung_up)
            if ended:
                _LOG.warning("%d calls have ended: no message came, or no answer was read, in time", ended)

    def _bound_memory(self) -> None:
        """Cancel RPCs before their time where they take too much memory together: those with unread answers if these
        are most of it, else those whose message has not come.

        Those pay for what answers take that are being made, or that were ended a moment ago, only if it stays.
        """
        if self._calls.is_empty and self._unread.is_empty:
            self._unclaimed.note_idle()
            self._with_answers = self._beyond = 0
            return
        has_answers = self._calls.is_working or not self._unread.is_empty
        self._with_answers = _FEW if has_answers else max(0, self._with_answers - 1)
        excess = self._unclaimed.excess
        self._beyond = self._beyond + 1 if excess else 0
        if not excess:
            return
        if 2 * self._unread.nbytes > self._limits.incomplete + excess:
            self._beyond, evicted = 0, self._unread.evict(excess)
        elif self._with_answers == 0 or self._beyond >= _FEW:
            evicted = self._calls.evict(1 + excess // self._limits.message)
        else:
            return
        if evicted:
            _LOG.warning("%d calls have ended: those that waited took %d bytes too many", evicted, excess)

    def close(self, grace: float) -> None:
        """Take no more requests, and give those that run so many seconds."""
        self._end.set()
        self._server.stop(grace).wait()
        if self._thread.is_alive():
            self._thread.join()


def _machine_of(peer: str) -> str:
    """Return what a call counts to, by gRPC's name for its peer: "ipv4:HOST:PORT", or "unix:" at a socket."""
    kind, _, rest = peer.partition(":")
    return f"{kind}:{machine_of(unquote(rest).rpartition(':')[0].strip('[]'))}"


def _nothing() -> None:
    pass


def _end(context: Any, code: grpc.StatusCode, text: str) -> None:
    """End a call in a thread that is not its own, and tell its client why. The library has no public name for that: one
    that has it no more ends the call without a word.
    """
    try:
        context._rpc_event.call.cancel(code.value[0], text)
    except (AttributeError, TypeError):
        context.cancel()


def _options(limits: DoorLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message),
        ("grpc.max_send_message_length", limits.message),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.max_allowed_incoming_connections", of_all(limits.connections)),
        ("grpc.max_connection_idle_ms", int(limits.idle * 1000)),
        ("grpc.max_concurrent_streams", limits.requests),
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.so_reuseport", 0),
    ]


def _contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


__all__ = ["PEER", "Credentials", "DoorLimits", "GrpcDoor", "GrpcFront"]
