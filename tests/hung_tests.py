"""Ends a test that hangs together with all processes that it has started.

`faulthandler` shows where a test hangs. It can end the worker, too, but not the worker's children: each process that
a test has forked keeps the worker's pipe open, and xdist waits for the end of that pipe.
"""

import contextlib
import sys
import threading
import time

import psutil

GRACE = 1.05  # the limit's share after which a test is ended: faulthandler writes at the limit itself


def watch(config):
    """Ends each test of this run that takes longer than `faulthandler_timeout`. Without xdist, faulthandler does so."""
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(HungTests(config))


class HungTests:
    """A plugin of the process that the workers belong to: it looks at the running tests every second."""

    def __init__(self, config):
        self._config = config
        self._limit = float(config.getini("faulthandler_timeout")) * GRACE
        self._begun = {}  # node id of each test that runs -> when it began
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_runtest_logstart(self, nodeid):
        self._begun[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        self._begun.pop(nodeid, None)

    def pytest_sessionfinish(self):
        self._over.set()

    def _watch(self):
        while not self._over.wait(1):
            for nodeid, begun in self._begun.copy().items():
                if time.monotonic() - begun > self._limit:
                    self._begun.pop(nodeid, None)
                    self._end(nodeid)

    def _end(self, nodeid):
        print(f"\n{nodeid} took longer than {self._limit:.0f} s; its worker is killed", file=sys.stderr)
        for node, scopes in self._config.pluginmanager.getplugin("dsession").sched.assigned_work.items():
            if any(tests.get(nodeid) is False for tests in scopes.values()):
                worker = psutil.Process(node.gateway._io.popen.pid)
                for process in [worker, *worker.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
