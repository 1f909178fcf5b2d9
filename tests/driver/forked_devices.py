"""Devices that begin with their modules in memory, as a new interpreter takes a fifth of a second to have them.

Run as a script, this is the fork server, with what every device imports in memory. For each device that it is asked for
it forks a process that runs the launcher of `driver.client.launch` as a new interpreter would: same arguments,
descriptors, directory and environment, also as /proc shows it. From there on everything is a device's own.
"""

import contextlib
import ctypes
import gc
import json
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from driver.client import discovery, launch

_KNOWN = "driver.service.process"  # a word by which a client knows a device's process
_ROOM = 4096  # bytes of the server's environment, in which each device's is written


class ForkServer:
    """What `driver.client.discovery` needs of `subprocess`, for as long as the tests of a worker run."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self):
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far:
            words = [sys.executable, "-P", __file__, str(far.fileno()), _KNOWN]
            environment = discovery.environment(Path("/")) | {"ROOM": "-" * _ROOM}
            self._process = subprocess.Popen(words, pass_fds=[far.fileno()], env=environment, cwd="/")

    def Popen(self, command, *, pass_fds, env, stdout, **options):  # noqa: N802 (as in subprocess)
        """A process of `command`; forked if it is the launcher of a device."""
        python, path, script, module, name, listener, *more = command
        assert [path, script, module, options["cwd"]] == ["-P", launch.__file__, _KNOWN, "/"]
        if python != sys.executable:
            return subprocess.Popen(command, pass_fds=pass_fds, env=env, stdout=stdout, **options)
        asked = json.dumps([[script, module, name, listener, *more], env]).encode()
        here, there = socket.socketpair()
        with here:
            with there:
                socket.send_fds(self._near, [asked], [there.fileno(), int(listener), stdout.fileno()])
            return _Launcher(*json.loads(here.makefile().readline()))

    def close(self):
        self._near.close()
        self._process.wait()


class _Launcher:
    def __init__(self, pid, code):
        self.pid, self._code = pid, code

    def wait(self, timeout=None):
        return self._code


def _serve(server):
    code = compile(Path(launch.__file__).read_text(), launch.__file__, "exec")
    gc.freeze()
    while True:
        asked, fds, _, _ = socket.recv_fds(server, 1 << 16, 3)
        if not asked:
            return
        if not (pid := os.fork()):
            server.close()
            _launch(code, *json.loads(asked), *fds)
        _, status = os.waitpid(pid, 0)
        os.write(fds[0], json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())
        for fd in fds:
            os.close(fd)


def _launch(code, words, environment, answer, listener, log):
    os.close(answer)
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _set_environment(environment)
    sys.argv = [*words[:3], str(listener), *words[4:]]
    exec(code, {"__name__": "__main__", "__file__": words[0]})


def _set_environment(environment):
    """Sets it, and writes it over the old one, which is what /proc/self/environ shows."""
    os.environ.clear()
    first, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[47:49])
    shown = b"".join(f"{name}={value}\0".encode() for name, value in environment.items())
    ctypes.memmove(first, shown.ljust(end - first, b"\0"), end - first)
    os.environ.update(environment)


if __name__ == "__main__":
    import_module(_KNOWN)
    import_module("driver.devices.reference")
    with contextlib.suppress(KeyboardInterrupt), socket.socket(fileno=int(sys.argv[1])) as server:
        _serve(server)
