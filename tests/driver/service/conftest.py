"""Clients of other accounts."""

import contextlib

import accounts as other_accounts
import pytest
from served_devices import FRIEND, GROUP, OTHER, STRANGER, Client


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
