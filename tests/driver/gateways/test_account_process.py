"""The processes of a gateway that root starts for several accounts, whatever one of them has become."""

import pwd
import subprocess
import sys

import accounts
import pytest
from waiting import PATIENCE

from driver.service.bounded_log import ALLOWANCE

KEEPS = """
import asyncio, os, select, signal, sys
from contextlib import suppress
from driver.errors import DeviceFailed
from driver.gateways.account_process import AccountProcess, GatewayAccount, GatewayKeeper

class Loud:
    addresses = ["here"]

    def begin(self):
        assert os.read(0, 1) == b""
        for _ in range(4096):
            select.select([], [2], [])
            with suppress(BlockingIOError):
                os.write(2, b"\\x1b]0;title\\x07" + b"x" * 1000 + b"\\n")
        os._exit(0)

async def keep(keeper):
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    with suppress(DeviceFailed):
        async with keeper:
            await end.wait()

account = GatewayAccount.of(int(sys.argv[1]), "/nowhere/device.sock", [])
asyncio.run(keep(GatewayKeeper([AccountProcess(account, "/nowhere/device.sock", Loud)], {})))
"""


def test_what_an_accounts_process_writes():
    """Goes to the gateway's log within an allowance, and moves nothing on a terminal; it reads no terminal either."""
    if why := accounts.missing():
        pytest.skip(why)
    command = [sys.executable, "-c", KEEPS, str(pwd.getpwnam("nobody").pw_uid)]
    done = subprocess.run(command, input=b"typed", capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == b""
    assert b"title" in done.stderr
    assert b"\x1b" not in done.stderr
    assert b"were left out" in done.stderr
    assert b"has ended" in done.stderr
    assert len(done.stderr) < 2 * ALLOWANCE
