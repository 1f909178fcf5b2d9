"""Clients with limits that a device would keep, as only privilege can reset them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from driver.client.launch import kept

CPU = "resource.setrlimit(resource.RLIMIT_CPU, (60, 60))"
NICE = "os.nice(5)"
NICE_WORDS = f"nice {min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)}"  # such a client's
DEVICE_NICE = kept().get("nice", 0)  # that of a device which this process starts

LIMITED_CLIENT = """
import ctypes, os, resource, signal, sys
{}
import driver
with driver.connect() as d:
    print(d.service_pid, d.engine_pid, flush=True)
    sys.stdin.read(1)
"""


def limited(how):
    """A client without privileges over limits that sets these; its device's processes are the first line it prints."""
    words = [sys.executable, "-c", LIMITED_CLIENT.replace("{}", how)]
    if not os.geteuid():
        if not shutil.which("setpriv"):
            pytest.skip("setpriv is not installed")
        words = ["setpriv", "--bounding-set=-sys_resource,-sys_nice", *words]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def limits_of(pid):
    """Soft and hard, by name, as the kernel writes them."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()[1:]
    return {line[:26].strip(): tuple(line[26:68].split()) for line in lines}
