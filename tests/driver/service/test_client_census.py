"""The count of a device's clients, which broker and service keep in the same way."""

import contextlib

import pytest

from burst import ResourceExhaustedTransient
from driver.engine import limits
from driver.service.client_census import ClientCensus

ONE, OTHER = 1000, 1001


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Three clients on the device, two of them of one account."""
    (tmp_path / "limits.toml").write_text("device_clients = 3\nuid_clients = 2\n")
    monkeypatch.setattr(limits, "limits_file", lambda: tmp_path / "limits.toml")
    return limits.limits()


def test_it_counts_by_account_and_admits_up_to_both_limits(configured):
    """A refused client is not counted, and whoever leaves makes room for one more."""
    census = ClientCensus(configured)
    census.enter(ONE)
    census.enter(ONE)
    with pytest.raises(ResourceExhaustedTransient, match="uid_clients = 2 is reached, with 2 in use"):
        census.enter(ONE)
    census.enter(OTHER)
    with pytest.raises(ResourceExhaustedTransient, match="device_clients = 3 is reached, with 3 in use"):
        census.enter(OTHER)
    assert (census.count(ONE), census.count(OTHER), census.total()) == (2, 1, 3)
    census.leave(ONE, 2)
    census.enter(OTHER)
    assert (census.count(ONE), census.total()) == (0, 2)


def test_a_cell_admits_those_whom_the_broker_has_admitted(configured):
    """Without limits it only counts."""
    census = ClientCensus(None)
    for _ in range(configured.uid_clients + 1):
        census.enter(ONE)
    assert census.total() == census.count(ONE) == configured.uid_clients + 1


def test_two_accounts_leave_room_for_others(monkeypatch, tmp_path):
    """Accounts that take all they can get keep no other account out: each that there may be gets a few connections."""
    (tmp_path / "limits.toml").write_text("device_clients = 64\nuid_clients = 32\ndevice_accounts = 8\n")
    monkeypatch.setattr(limits, "limits_file", lambda: tmp_path / "limits.toml")
    census = ClientCensus(limits.limits())
    greedy, others = (ONE, OTHER), range(2000, 2006)
    for uid in greedy:
        for _ in range(64):
            with contextlib.suppress(ResourceExhaustedTransient):
                census.enter(uid)
    with pytest.raises(ResourceExhaustedTransient, match="with 48 in use; 16 are kept for accounts with fewer than 2;"):
        census.enter(OTHER)
    for uid in others:
        census.enter(uid)
        census.enter(uid)
    assert census.total() == 48 + 2 * len(others)
