"""The ledger counts what each application of each account holds, and refuses what exceeds a limit."""

import gc

import pytest

from burst import ResourceExhaustedPersistent, ResourceExhaustedTransient
from driver.engine.ledger import FIGURES, Ledger
from driver.engine.limits import NO_LIMIT, Limits, limits
from driver.protocol.ledger_report import LedgerReport

FEW = Limits(client_bytes=1, device_bytes=12, account_bytes=8, application_percent=75)


@pytest.fixture
def ledger():
    return Ledger(FEW)


def held(ledger, uid=None):
    """What applications hold."""
    return {(row.uid, row.application): row.held for row in ledger.rows(uid) if row.application is not None}


def test_what_is_taken_is_counted_until_it_is_given_back(ledger):
    """By hand, by `with` and by the last reference, and once."""
    holder = ledger.account(1000).application("camera")
    by_hand = holder.take("close models", bytes=2, mappings=3)
    with holder.take("close models", bytes=1):
        assert held(ledger) == {(1000, "camera"): {"bytes": 3, "mappings": 3}}
    by_hand.give_back()
    by_hand.give_back()
    assert held(ledger) == {(1000, "camera"): {}}
    claim = holder.take("close models", bytes=4)
    assert held(ledger) == {(1000, "camera"): {"bytes": 4}}
    del claim
    assert held(ledger) == {(1000, "camera"): {}}


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ({(1000, "a"): 6}, r"75 % of account_bytes = 8 is reached: this application has 6 .* asks for 1 more"),
        ({(1000, "a"): 4, (1000, "b"): 4}, "account_bytes = 8 is reached: this account has 8"),
        ({(1001, "a"): 6, (1002, "a"): 6}, "device_bytes = 12 is reached: all accounts have 12"),
    ],
    ids=["application", "account", "device"],
)
def test_what_exceeds_a_limit_is_refused_with_the_figure(ledger, before, words):
    """The error names the limit, what is in use, the remedy and the file; nothing is counted."""
    claims = [ledger.account(uid).application(name).take("", bytes=n) for (uid, name), n in before.items()]
    holder = ledger.account(1000).application("a")
    with pytest.raises(ResourceExhaustedTransient, match=f"{words}.*; close models, or raise .*_bytes in .*toml"):
        holder.take("close models", mappings=1, bytes=1)
    assert not holder.held["mappings"]
    claims.clear()
    holder.take("close models", bytes=1)


def test_what_could_never_fit_is_refused_for_good(ledger):
    """And not until other things are given back."""
    with pytest.raises(ResourceExhaustedPersistent, match="75 % of account_bytes = 8"):
        ledger.account(1000).application("a").take("close models", bytes=7)


def test_shared_memory_is_counted_once(ledger):
    """For each application, each account and all, however often they hold it, until the last of them lets go."""
    holders = [ledger.account(uid).application(name) for uid, name in ((1000, "a"), (1000, "b"), (1001, "a"))]
    claims = [holder.hold("", "a model", 4) for holder in (*holders, holders[0])]
    assert [*held(ledger).values()] == [{"bytes": 4}] * 3
    assert ledger.account(1000).held["bytes"] == ledger.held["bytes"] == 4
    del claims[3], claims[1]
    assert [holder.held["bytes"] for holder in holders] == [4, 0, 4]
    claims.clear()
    assert not ledger.held["bytes"]


def test_an_application_that_is_gone_is_forgotten(ledger):
    """Names cost nothing once neither a client nor a claim has them."""
    claims = [ledger.account(1000).application(str(n)).take("", mappings=1) for n in range(50)]
    assert len(held(ledger)) == 50
    claims.clear()
    gc.collect()
    assert held(ledger) == {}


def test_what_is_spent_adds_up(ledger):
    """Seconds and bytes of logs are never refused; an account remembers those of applications that are gone."""
    account = ledger.account(1000)
    holder = account.application()
    holder.spend("preparing_seconds", 0.5)
    holder.spend("preparing_seconds", 0.25)
    assert [row.spent for row in ledger.rows()] == [{"preparing_seconds": 0.75}] * 2
    del holder
    assert ledger.rows() == [(1000, None, {}, {"preparing_seconds": 0.75})]


def test_a_report_travels_in_pages(ledger):
    """All rows come, with the limits, however many there are, and a row's figures are those nearest to their limits."""
    holders = [ledger.account(1000 + n).application("camera") for n in range(130)]
    claims = [holder.take("", bytes=1, life_words=700) for holder in holders[:2]]

    def call(method, process, start):
        assert (method, process) == ("ledger", "engine")
        return ledger.report(None).page(start), []

    report = LedgerReport.read(call, "engine")
    assert report.rows == ledger.rows()
    assert report.shares(report.rows[1])[0] == ("life_words", 700, 1395)
    assert report.shares(report.rows[0])[0] == ("life_words", 700, 1860)
    assert len(claims) == 2


def test_by_default_no_account_can_take_all_of_anything():
    """An account has half at most where others are served, and else all that there is, less the process's reserve."""
    for is_shared, parts in ((True, 2), (False, 1)):
        found = limits(is_shared=is_shared).figures()
        assert found.keys() == FIGURES.keys()
        assert found.pop("gpu_bytes").device == NO_LIMIT  # the driver knows what the GPU has
        assert found.pop("engine_bytes").device == NO_LIMIT  # each account's engine is its own
        assert found.pop("runtime_bytes").device == NO_LIMIT  # as before
        for figure, most in found.items():
            assert 0 < parts * most.account <= most.device < (parts + 1) * most.account, figure


def test_a_limit_that_is_no_setting_has_no_remedy_of_its_own(ledger):
    """What follows from a process's own tables cannot be raised, so the error names only what a client can do."""
    with pytest.raises(ResourceExhaustedPersistent, match=r"account_guards = 3750 is reached: .*; seal it") as refused:
        ledger.account(1000).application("a").take("seal it", guards=4000)
    assert "limits.toml" not in str(refused.value)
