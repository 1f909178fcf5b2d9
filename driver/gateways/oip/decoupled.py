"""Decoupled models: one request, many answers, which are the results of a stream.

config.pbtxt says so by `model_transaction_policy { decoupled: true }`, and by parameters how a step follows another:

    parameters { key: "feedback" value { string_value: '{"present": "past"}' } }
    parameters { key: "until" value { string_value: '{"token": [0, 2]}' } }
    parameters { key: "most" value { string_value: "256" } }

as `burst.stream_results` takes them: `feedback` and `also` in JSON, `until` in JSON or the name of an output. A request
may have a parameter `most` of its own, up to the folder's.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from driver.client.stream_plan import StreamPlan
from driver.gateways.refusal import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from driver.nn import Model

DEPTH = 4  # results that the device works ahead of the client
_MOST = 4096
_NAMES = "feedback", "until", "most", "also"


class DecoupledTerms(NamedTuple):
    """The words of config.pbtxt on a decoupled model."""

    feedback: Any
    until: Any = None
    most: int = _MOST
    also: Any = ()

    @classmethod
    def of(cls, where: str, parameters: Mapping[str, Any]) -> Self:
        """Read parameters of the file. Raise Refusal, which begins with `where`."""
        given = {name: parameters[name].string_value for name in _NAMES if name in parameters}
        if "feedback" not in given:
            raise invalid(f"{where}: a decoupled model needs the parameter feedback: outputs and their inputs")
        try:
            found = {name: json.loads(text) for name, text in given.items() if name != "until"}
        except ValueError as error:
            raise invalid(f"{where}: parameters feedback, most and also are JSON: {error}") from None
        if (until := given.get("until")) is not None:
            found["until"] = _json_or_name(where, until)
        return cls(**found)

    def plan(self, where: str, model: Model, most: int = 0) -> StreamPlan:
        """Return how the model's steps follow each other, `most` of them, or as the file says. Raise Refusal."""
        try:
            plan = StreamPlan.of(model, self.feedback, until=self.until, most=self.most, also=self.also)
        except (TypeError, ValueError) as error:
            raise invalid(f"{where}: {error}") from None
        if most > plan.most:
            raise invalid(f"most={most}: this model's configuration allows {plan.most}")
        return plan._replace(most=most or plan.most)


def steps_wanted(parameters: Mapping[str, Any]) -> int:
    """Return how many answers a request asks for at most; 0: it does not say. Raise Refusal."""
    most = parameters.get("most")
    if most is None:
        return 0
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise invalid(f"most={most!r:.40}: how many answers there are at most, an integer from 1 on")
    return most


def _json_or_name(where: str, text: str) -> Any:
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise invalid(f"{where}: parameter until is the name of an output, or JSON: {error}") from None
