"""What a model's inputs are fed with, and which outputs go back to them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import click
import numpy as np

from driver.cli.inputs import ZEROS, Feed, feeds
from driver.cli.ports import declared, inputs_of, outputs_of, shape_words
from driver.cli.sizes import given_sizes
from driver.cli.states import recognised, states_of
from driver.errors import ImportFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driver.cli.inputs import FeedOptions
    from driver.cli.ports import Port
    from driver.cli.sizes import Sizes
    from driver.cli.states import States
    from driver.importers.header import Header
    from driver.nn import Model


@dataclass(frozen=True, slots=True)
class Wiring:
    """Inputs and outputs of a model, what the inputs are fed with, and the states among them.

    chosen: the shapes that were chosen for inputs where the file leaves sizes open, and the user did not give them.
    is_stream: the device repeats the execution on its states.
    """

    inputs: Sequence[Port]
    outputs: Sequence[Port]
    fed: Sequence[Feed]
    states: States
    chosen: dict[str, Sizes]
    is_stream: bool = False

    @classmethod
    def of(
        cls, header: Header, inputs: Sequence[str], shapes: Sequence[str], states: Sequence[str], options: FeedOptions
    ) -> Wiring:
        """Return it for a file, from the values of --input, --shape and --state. Raise UsageError, ImportFailed."""
        if header.refusals:
            raise ImportFailed(header.refusals[0].reason, remedy=header.refusals[0].remedy)
        ins, outs = declared(header)
        links, sizes = states_of(ins, outs, states), given_sizes(ins, shapes)
        fed = feeds(ins, inputs, sizes, options, states={ins[i].name for i in links.values()})
        pairs = zip(ins, fed, strict=True)
        chosen = {
            port.name: feed.array.shape
            for port, feed in pairs
            if not port.operand.is_known and 0 in sizes.get(port.name, (0,))
        }
        return cls(ins, outs, fed, links, chosen=chosen)

    def in_form_of(self, model: Model) -> Wiring:
        """Return it for the model that was made of the file: its importer may have made further inputs and outputs of
        states.
        """
        ins, outs = inputs_of(model), outputs_of(model)
        more = [Feed(np.zeros(p.operand.dimensions, p.operand.type.dtype), ZEROS, "the initial state") for p in ins]
        links = {o: i for o, i in recognised(ins, outs).items() if i >= len(self.inputs)}
        given = [
            feed._replace(array=feed.array.reshape(port.operand.dimensions)) if feed.array.size == 1 else feed
            for port, feed in zip(ins, self.fed, strict=False)
        ]
        fed = [*given, *more[len(given) :]]
        labelled = _with_labels(outs, self.outputs)
        return Wiring(ins, labelled, fed, self.states | links, chosen=self.chosen, is_stream=self.is_stream)

    def as_stream(self) -> Wiring:
        """Return it for a stream of results. Raise UsageError where that is none."""
        if not self.states:
            raise click.UsageError("--stream: no output is fed back; pass --state OUTPUT=INPUT")
        if self.unit:
            raise click.UsageError(f"--stream: the device repeats one execution, and not one for each {self.unit}")
        return replace(self, is_stream=True)

    @property
    def shapes(self) -> dict[str, Sizes]:
        """The shape of each input that has one."""
        return {
            port.name: feed.array.shape
            for port, feed in zip(self.inputs, self.fed, strict=True)
            if not port.operand.type.is_scalar
        }

    @property
    def chosen_words(self) -> str:
        """The shapes that were chosen, and how to choose others; "" if none were."""
        if not self.chosen:
            return ""
        told = ", ".join(f"{name!r} was given as {shape_words(shape)}" for name, shape in self.chosen.items())
        return f"; the model leaves sizes open, and {told}: pass the right ones with --shape"

    @property
    def unit(self) -> str:
        """The unit of the rows: "frame" or "block" of an input, "step" of a stream; "" if there is one execution."""
        if self.is_stream:
            return "step"
        return next((feed.later.unit for feed in self.fed if feed.later), "")

    def close(self) -> None:
        """End streams."""
        for feed in self.fed:
            if feed.later:
                feed.later.close()


def _with_labels(ports: Sequence[Port], own: Sequence[Port]) -> list[Port]:
    """Return the outputs, with the labels that the file has for them."""
    more = [{"labels": port.labels} if port.labels else {} for port in own] + [{}] * len(ports)
    extras = [{**(port.operand.extra or {}), **its} for port, its in zip(ports, more, strict=False)]
    return [p._replace(operand=replace(p.operand, extra=its)) for p, its in zip(ports, extras, strict=True)]
