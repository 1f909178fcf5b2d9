"""How a device renews itself: a second engine takes over, between two requests, what clients have in the first.

Each client moves itself, because it has all that the second engine needs: its models, its memory, the cache files and
the shapes of its requests. A request is sent to one engine alone, and the client chooses between two requests which one
that is: so none is lost, and none is executed twice.

What clients call on their connection to the first service:

| call | answer |
|---|---|
| `renew`, why | the `RenewalState`: "asked". Refused where two engines cannot be, with the reason |
| `renewal` | the `RenewalState`, and a pipe that ends when that changes, or when this connection does |
| `successor` | "start": this client starts the second service; "wait": another one does; "go": it is there |
| `succeeded` | the second service is there, and has the device's name: "moving" |
| `drained` | in the stage "draining": this client has nothing in flight, and begins nothing |
| `moving`, true or false | to the second service: this client prepares there, at a low priority; or all is ready |
| `stays`, why | this client cannot move; if none has, the first engine goes on for all: "stayed" |

```
idle ── renew ──► asked ── succeeded ──► moving ──► the last client has left: the first service ends
  ▲                 │                      │
  └─── renew ── stayed ◄──── stays ────────┘ (new clients go to the second one by now)
```

A client that is told "asked" waits until its buffers on the device are gone, connects to the second service, prepares
its models there (from the cache, where they are kept), runs each shape that its requests have on both engines, and
compares the bits. Then it opens each of its bursts there as well, and lets each go over when nothing of it is in
flight. What has begun on the first connection, fenced executions and streams, ends there; then the client closes it.
Whatever fails before a burst goes over leaves everything as it was.

A device that exists once cannot have two engines: it is restarted. Its clients are told "draining"; each lets what it
has in flight end, holds back what comes, and says `drained`. When all have said so the service ends, a client starts it
again, and all prepare their models there. If one of them cannot, or does not within ten seconds, it says `stays`, and
all go on as before.

A service that a client has started is followed by one that a client starts: at a name beside the device's, which the
socket gets when the second engine has answered (`rename`); so new code is loaded, too. A cell is followed by one that
its broker forks for the account's next client.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self, get_args

from burst import Malformed

Stage = Literal["idle", "asked", "moving", "stayed", "draining"]
Step = Literal["start", "wait", "go"]
"""What a client does that asks for the successor."""


class RenewalState(NamedTuple):
    """How the renewal of a device stands."""

    number: int = 0  #: of renewals so far
    stage: Stage = "idle"
    words: str = ""  #: why it was asked for, or why the first engine stays

    @property
    def is_going_on(self) -> bool:
        """True if clients are to move."""
        return self.stage in ("asked", "moving", "draining")

    @classmethod
    def from_wire(cls, values: list[Any]) -> Self:
        """Read the values of an answer. Raise Malformed."""
        match values:
            case [int(number), str(stage), str(words)] if stage in get_args(Stage):
                return cls(number, stage, words)  # type: ignore[arg-type]
            case _:
                raise Malformed("the state of a renewal is malformed")
