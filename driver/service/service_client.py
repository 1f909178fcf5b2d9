"""One client of a service: the calls of its connection, which the service answers or forwards to the engine."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from burst import InvalidArgument, Malformed, PeerDied, ResourceExhaustedTransient, StatusError
from burst.channel import close_all
from driver.config import device_uid
from driver.engine.ledger import price
from driver.protocol.model_codec import handles_in
from driver.protocol.prepare_arguments import WIRE_LENGTH, PrepareArguments
from driver.protocol.rpc import PROTOCOL, Reply, call
from driver.service.applications import application_of
from driver.service.preparation_times import key_of
from driver.service.process_figures import ProcessFigures
from fmq import LifePage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from burst.channel import Channel, Message
    from driver.engine.ledger import Claim
    from driver.service.engine_renewal import Renewal
    from driver.service.process import Service
    from driver.service.validation import Explained

_MOST_REASONS, _MOST_REASON, _LEAST_REASON = 30_000, 1000, 60  # characters: of all that are told, and of each

_WORTH_TELLING = 10e-3  # seconds
FORWARDED = (
    *("free", "lane", "burst", "allocate", "allocate_all", "release", "copy_from", "copy_to", "copy", "seal", "unseal"),
    *("buffer_state", "stage", "turns", "status", "traces", "real_time", "census", "capabilities", "time_work"),
)
"""Methods that a service passes on to its engine."""


class ServiceClient:
    """One connection."""

    def __init__(self, channel: Channel, service: Service, *, has_time: bool = False) -> None:
        """`has_time`: what it prepares may take its time on an engine of low priority. Raise ResourceExhaustedTransient
        if the account may have no further connection.
        """
        self._service, self._channel, self._has_time = service, channel, has_time
        self._join("")
        self._engine = service.new_engine_channel(channel.peer_uid)
        self._life = LifePage()
        self._validated = 0.0  # seconds that the ledger does not know yet
        self.handlers: dict[str, Callable[..., Reply]] = {
            "hello": self.hello,
            "supported": self.supported,
            "explain": self.explain,
            "prepare": partial(self.noted, "prepared", "refused", self.prepare),
            **{method: partial(self.forward, method) for method in FORWARDED},
            "clock": lambda _: Reply([time.monotonic_ns()]),
            "figures": self.figures,
            "cells": self.cells,
            "ledger": self.ledger,
            "memory": self.memory,
            "sandbox": lambda _: Reply(self._service.confinement()),
            "restore": partial(self.noted, "restored", "not_restored", self.restore),
            "renew": self.renew,
            "moving": self.moving,
            **self.methods_of_renewal(service.renewal),
        }

    def __enter__(self) -> Self:
        return self

    def _join(self, application: str) -> None:
        holder = self._service.ledger.account(self._channel.peer_uid).application(application)
        self._claim, self._holder = holder.take("close connections", **price("connection")), holder

    def take(self, remedy: str, **figures: int) -> Claim:
        """Count what this process holds for the client, as `Holder.take` does."""
        return self._holder.take(remedy, **figures)

    def __exit__(self, *_: object) -> None:
        self._claim.give_back()
        self._service.renewal.forget(self._channel)
        self._engine.close()
        self._life.close()

    def hello(self, _: Message, version: int, *declared: object) -> Reply:
        """Describe the device. `declared`: the name of the client's application, or nothing.

        Raise InvalidArgument for another version of the protocol, or a name that cannot be one;
        ResourceExhaustedTransient while the account has as many applications as it may have.
        """
        if version != PROTOCOL:
            raise InvalidArgument(
                f"protocol {version}: this service speaks {PROTOCOL}; use the same release on both sides"
            )
        # The answer proves that the engine is alive: a client that reconnects after a death relies on it.
        application = application_of(self._channel, declared)
        try:
            call(self._engine, "join", application, bool(declared))
        except PeerDied as error:
            if self._service.has_lost_engine:
                raise
            raise ResourceExhaustedTransient(
                "the device has run out of resources: its engine cannot serve another client; try again later"
            ) from error
        self._join(application)
        return Reply(self._service.describe(self._channel.peer_uid), [os.dup(self._life.fd)])

    def supported(self, message: Message, where: object) -> Reply:
        """`supported_operations` of the model in the descriptors, one bit each."""
        return Reply(_as_bits(self._explained(message.take_fds(), where).reasons))

    def explain(self, message: Message, where: object) -> Reply:
        """Answer as `supported`, and with number and reason of the first that are not, shortened where there are
        many.
        """
        reasons = self._explained(message.take_fds(), where).reasons
        found = [(n, reason) for n, reason in enumerate(reasons) if reason is not None]
        most = max(_LEAST_REASON, min(_MOST_REASON, _MOST_REASONS // max(1, len(found))))
        return Reply([*_as_bits(reasons), [(n, reason[:most]) for n, reason in found[: _MOST_REASONS // most]]])

    def prepare(self, message: Message, where: object, *plain: object) -> Reply:
        """Validate a model here, compile it in the engine, and answer with the prepared model's number.

        The engine decodes the model again, from the same sealed memory: what it takes from this process are bytes,
        never objects, and the time and crashes of judging a stranger's model are the service's.

        Cache files may follow the model's descriptors, as many as the arguments say, and then memory for a trace.
        """
        arguments = PrepareArguments.from_wire(*plain)
        count = 1 + len(handles_in(where))
        if len(message.fds) < count:
            raise Malformed("a descriptor of the model is missing")
        fds = message.take_fds()
        try:
            explained = self._explained([os.dup(fd) for fd in fds[:count]], where, arguments.deadline)
            explained.check()
            explained.reasons.clear()
            values = self._load(explained, fds, where, arguments)
        finally:
            close_all(fds)
        if arguments.cache_counts:
            self._service.note("declined" if values[-1] else "saved")
        return Reply(values)

    def _explained(self, fds: list[int], where: object, deadline: int | None = None) -> Explained:
        budget = self._service.new_budget(deadline, self._channel)
        try:
            return self._service.validator.explained(self._channel.peer_uid, fds, where, budget)
        finally:
            self._validated += budget.seconds
            if self._validated > _WORTH_TELLING:
                call(self._engine, "spend", "validating_seconds", self._validated)
                self._validated = 0.0

    def _load(self, explained: Explained, fds: list[int], where: Any, arguments: PrepareArguments) -> list[Any]:
        """Prepare in the engine; return its answer to the client. Raise StatusError, PeerDied."""
        values: list[Any] = []
        own, uid = fds[: 1 + len(handles_in(where))], self._channel.peer_uid
        key = key_of(uid, arguments, explained.structure)
        times, known = self._service.times, self._service.times.known(key)
        try:
            with self._service.files.admitted(uid, explained.file, own, where, arguments=arguments) as file:
                values, _ = call(self._engine, "load", file, [key, known], where, *arguments.to_wire(), fds=fds)
                times.note(key, known, found=values.pop(1))
        except StatusError:
            if values:  # the file ended its trial in the run that followed
                call(self._engine, "free", values[0])
            raise
        return values

    def noted(
        self, done: str, failed: str, method: Callable[..., Reply], message: Message, *arguments: object
    ) -> Reply:
        """Call a method that prepares a model, and count its outcome."""
        self._begin_preparation()
        try:
            reply = method(message, *arguments)
        except Exception:
            self._service.note(failed)
            raise
        self._service.note(done)
        return reply

    def restore(self, message: Message, *arguments: Any) -> Reply:
        """Make the model in the cache files ready in the engine, unless it is a file in quarantine."""
        times, plain = self._service.times, arguments[:WIRE_LENGTH]
        asked = PrepareArguments.from_wire(*plain, restores=True)
        key = key_of(self._channel.peer_uid, asked, b"restored" + (asked.cache_token or b""))
        known = times.known(key)
        (number, found, file, *terms), _ = call(self._engine, "restore", [key, known], *arguments, fds=message.fds)
        times.note(key, known, found=found)
        try:
            self._service.check_file(file, self._channel.peer_uid)
        except StatusError:
            call(self._engine, "free", number)
            raise
        return Reply([number, *terms])

    def moving(self, _: Message, is_moving: bool) -> Reply:
        """Note that this client comes from the engine before, where its requests go on; or, that all is ready here."""
        self._has_time = bool(is_moving)
        self._hurry()
        return Reply([])

    def _hurry(self) -> None:
        if not self._has_time:
            self._service.end_low_priority()

    def _begin_preparation(self) -> None:
        self._hurry()
        self._service.renewal.note_models(self._channel)

    def methods_of_renewal(self, renewal: Renewal) -> dict[str, Callable[..., Reply]]:
        """Return by name what a client of an engine that is renewed may ask."""
        return {
            "renewal": lambda _: renewal.tell(self._channel),
            "successor": lambda _, can_start: renewal.successor(self._channel, bool(can_start)),
            "succeeded": lambda _: renewal.succeeded(self._channel),
            "drained": lambda _: renewal.drained(self._channel),
            "stays": lambda _, why: renewal.stays(self._channel, str(why)),
        }

    def renew(self, _: Message, why: str) -> Reply:
        """Have the clients of the engine go over to another one. Raise InvalidArgument for a client of an account that
        does not own the engine, and as `Renewal.begin`.
        """
        self._check_owner("renew")
        self._service.renewal.begin(str(why))
        return Reply([*self._service.renewal.state])

    def figures(self, message: Message) -> Reply:
        """Answer with the engine's figures, then connected clients, outcomes of preparations, and figures of both
        processes.

        Raise InvalidArgument.
        """
        values, _ = call(self._engine, "figures", fds=message.fds)
        clients, outcomes = self._service.counts()
        return Reply([*values, clients, outcomes, *map(ProcessFigures.of, self._service.pids)])

    def cells(self, _: Message, first: int) -> Reply:
        """Return how many services there are with an engine for one account, a page of them, and a connection to each.

        None where one engine has all accounts, or where the client is neither of the device's own account nor root.
        """
        return self._service.cells(self._channel.peer_uid, first)

    def ledger(self, message: Message, process: str, start: int) -> Reply:
        """Answer with a page of what applications hold in the engine, or in this process.

        A client sees those of its own account; root and the device's account see all.
        """
        uid = self._channel.peer_uid
        if process == "engine":
            return self.forward("ledger", message, start)
        self._service.watch.measure()
        return Reply(self._service.ledger.report(None if uid in {0, device_uid()} else uid).page(start))

    def memory(self, _: Message) -> Reply:
        """Answer with the engine's private memory, what of it no client accounts for, and by how much that grows in an
        hour, or nil. Raise InvalidArgument for a client of an account that does not own the engine.
        """
        self._check_owner("see the memory of")
        return Reply([*self._service.upkeep.memory(self._service.watch.measure())])

    def _check_owner(self, verb: str) -> None:
        owner = self._service.owner
        if self._channel.peer_uid not in {0, device_uid(), owner}:
            raise InvalidArgument(f"uid {self._channel.peer_uid} may not {verb} an engine of uid {owner}")

    def forward(self, method: str, message: Message, *arguments: Any) -> Reply:
        """Pass a call on to the engine."""
        values, fds = call(self._engine, method, *arguments, fds=message.fds)
        return Reply(values, fds)


def _as_bits(reasons: Sequence[str | None]) -> list[object]:
    return [len(reasons), np.packbits([reason is None for reason in reasons]).tobytes()]
