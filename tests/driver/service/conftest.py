"""Clients of other accounts."""

import contextlib

import accounts as other_accounts
import pytest
from served_devices import CONNECT, FRIEND, GROUP, OTHER, STRANGER, Client


@pytest.fixture(scope="module")
def accounts():
    """Clients: a friend and another in the group, and a stranger who is not. Nobody but root can become others."""
    if why := other_accounts.missing():
        pytest.skip(why)
    with contextlib.ExitStack() as stack:
        found = [
            stack.enter_context(Client(uid, *groups)) for uid, *groups in ((FRIEND, GROUP), (OTHER, GROUP), (STRANGER,))
        ]
        assert all(client.is_ready() for client in found)
        yield found


@pytest.fixture
def members(accounts, broker):
    """The friend and the other, with a model prepared on the device of the file's `broker`."""
    for client in accounts[:2]:
        assert client.do(CONNECT.format(broker[0])) is None
    yield accounts[:2]
    for client in accounts[:2]:
        assert client.do("device.close()") is None
