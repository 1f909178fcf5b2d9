"""Devices that `burst serve` runs for tests, and clients of other accounts."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import accounts as other_accounts
import numpy as np

from driver.client import discovery

SERVER, GROUP, FRIEND, OTHER, STRANGER = 61001, 61900, 61002, 61003, 61004  # nobody's: numbers need no account
X = np.ones((1, 4), np.float32)


@contextlib.contextmanager
def folder():
    """A temporary one that everybody may enter, with a path short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="burst-s-", dir="/tmp") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@contextlib.contextmanager
def served(path, *options, device="reference", says="{device} is served at {socket}", account=(), under=()):
    """The process of `burst serve DEVICE --dir PATH`, listening; killed in the end if it lives.

    `account`: a uid and further groups; this process's by default. `under`: a command that runs it.
    """
    heard = "/usr/bin/env", "--default-signal=HUP"  # also where who runs the tests ignores it, as nohup does
    serve = sys.executable, "-m", "driver.cli", "serve", device, "--dir", str(path)
    words = [*under, *heard, *serve, *map(str, options)]
    if account:
        words = other_accounts.words_as(account[0], account[1:], words)
    environment = os.environ | {"HOME": str(path.parent)}
    with (
        open(path.parent / "log", "ab") as log,
        subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, env=environment, cwd="/", start_new_session=True
        ) as process,
    ):
        try:
            said = process.stdout.readline().decode()
            expected = says.format(device=device, socket=f"{path}/{discovery.stem_of(device)}.sock") + "\n"
            assert said == expected, Path(log.name).read_text()
            yield process
        finally:
            process.kill()


class Client:
    """A Python process of another account: it runs lines of code, and answers what they leave in `out`."""

    CODE = """
import json, os, sys
import numpy as np
import driver
from driver.client.device_buffers import BufferDesc, BufferRole
builder = driver.ModelBuilder()
X = np.ones((1, 4), np.float32)
builder.output(builder.operation("ADD", builder.input("float32", (1, 4)), X, 0))
model = builder.build()
print(flush=True)
for line in sys.stdin:
    out = None
    try:
        exec(json.loads(line))
    except Exception as error:
        out = f"{type(error).__name__}: {error}"
    print(json.dumps(out), flush=True)
"""

    def __init__(self, uid, *groups):
        self._process = subprocess.Popen(
            other_accounts.python_as(uid, groups, self.CODE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )

    def is_ready(self):
        return self._process.stdout.readline() == "\n"

    def do(self, *lines):
        """What came of it; the text of an error."""
        self._process.stdin.write(json.dumps("\n".join(lines)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def kill(self):
        self._process.kill()
        self._process.communicate()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def with_capabilities(*names):
    """The command that root runs a device's under, for that account to have these capabilities and no others."""
    given = ",".join(f"+{name}" for name in names)
    words = ["/usr/bin/setpriv", f"--reuid={SERVER}", f"--regid={SERVER}", f"--groups={GROUP}"]
    return [*words, f"--inh-caps={given}", f"--ambient-caps={given}", f"--bounding-set=-all,{given}"]


@contextlib.contextmanager
def foreign(*options, device="reference", limits="", descriptors=None, under=(), capabilities=()):
    """`burst serve` of another account; the path of its socket, and its process. `limits`: its limits.toml.

    `descriptors`: how many each of its processes may have. `under`: a command that runs it. `capabilities`: that it
    has, and no others.
    """
    with folder() as path:
        os.chown(path, SERVER, SERVER)
        config = path / ".config/burst"
        config.mkdir(parents=True)
        (config / "limits.toml").write_text(limits)
        options = [str(option).format(home=path) for option in options]
        most = ["/usr/bin/prlimit", f"--nofile={descriptors}"] if descriptors else []
        account, under = (SERVER, GROUP), [*most, *under]
        if capabilities:
            account, under = (0, GROUP), [*with_capabilities(*capabilities), *under]
        with served(path / "run", *options, device=device, account=account, under=under) as process:
            yield str(path / f"run/{discovery.stem_of(device)}.sock"), process


SINGLE = "burst_test_devices.single:Accelerator"
CONNECT = "device = driver.connect({!r}); prepared = device.prepare(model)"
