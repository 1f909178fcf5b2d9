"""A device that does what a program would do that has taken a device over, as far as the kernel lets it."""

from __future__ import annotations

import json
import os
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst import GeneralFailure
from burst_test_devices.calls_on_others import failures_on_itself, of_addresses, of_others, on_a_process
from driver.devices.reference import ReferenceDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from driver.interface import Preparation, PreparedModel
    from driver.nn import Model


ORDERS = Path("~/.config/burst/intruder.json")


def _connect(address: Any, family: int) -> None:
    with socket.socket(family) as sock:
        sock.connect(address)


def attempts(said: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What is tried, by name. `said`: by the test: files and processes to attack, addresses to reach."""
    secret, client = Path(said["secret"]), said["client"]
    return {
        "read a file of the account": secret.read_bytes,
        "write to it": lambda: secret.open("a"),
        "list the home folder": lambda: os.listdir(secret.parent),
        "make a file in the home folder": lambda: secret.with_name("new").touch(),
        "remove a file of the account": secret.unlink,
        "rename it": lambda: secret.rename(secret.with_name("renamed")),
        "let others read it": lambda: secret.chmod(secret.stat().st_mode),
        "give it away": lambda: os.chown(secret, -1, -1),
        "change its time": lambda: os.utime(secret, (1, 1)),
        "lock others out of the configuration": lambda: os.fchmod(os.open(ORDERS.expanduser().parent, os.O_RDONLY), 0),
        "make a file in /tmp": lambda: Path(f"/tmp/burst-intruder-{os.getpid()}").touch(),
        "change the device's own code": lambda: Path(__file__).open("a"),
        "change what the device is configured by": lambda: ORDERS.expanduser().open("a"),
        "put a socket in the place of a device's": lambda: socket.socket(socket.AF_UNIX).bind(said["socket"]),
        "signal the client": lambda: os.kill(client, 0),
        "signal the process that started it": lambda: os.kill(os.getppid(), 0),
        **{f"signal process {pid}": partial(os.kill, pid, 0) for pid in said.get("others", ())},
        **{
            f"open the records in {folder}": partial(os.open, folder, os.O_RDONLY) for folder in said.get("records", ())
        },
        "read the client's memory": lambda: Path(f"/proc/{client}/mem").open("rb"),
        "read the client's environment": lambda: Path(f"/proc/{client}/environ").read_bytes(),
        "open what the client has open": lambda: Path(f"/proc/{client}/fd/0").open("rb"),
        "connect to an abstract socket": lambda: _connect("\0" + said["abstract"], socket.AF_UNIX),
        "connect by TCP": lambda: _connect(("127.0.0.1", said["port"]), socket.AF_INET),
        "start a program": lambda: os.execv("/bin/true", ["true"]),
        **of_others(client),
        **{f"{what} of {pid}": call for pid in said.get("others", ()) for what, call in on_a_process(pid).items()},
    }


def succeeded(*, computes: bool) -> str:
    """The names of all attempts that the kernel did not refuse, and of what it refuses a process to do to itself.

    `computes`: in a process that has all its connections.
    """
    tried = attempts(json.loads(ORDERS.expanduser().read_text())) | (of_addresses() if computes else {})
    found = failures_on_itself()
    for name, attempt in tried.items():
        try:
            attempt()
        except PermissionError:
            continue
        except OSError as error:
            found.append(f"{name}: {error}")
        else:
            found.append(name)
    return f"{os.getpid()}: {found}"


class Intruder(ReferenceDevice):
    """Tells in the reason for which it does not support MUL what the service may do, and as the failure to prepare ADD
    what the engine may do.
    """

    def explain(self, model: Model) -> list[str | None]:
        return [
            None if operation.type == "ADD" else succeeded(computes=self.asked_apart)
            for operation in model.main.operations
        ]

    def prepare(self, model: Model, preparation: Preparation) -> PreparedModel:
        """Does so until it is told what to attack."""
        if not ORDERS.expanduser().exists():
            return super().prepare(model, preparation)
        raise GeneralFailure(succeeded(computes=True))


class IntruderApart(Intruder):
    """The same, asked about models in a process of its own."""

    asked_apart = True
