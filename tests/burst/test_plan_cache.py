"""The plans that are kept: a bounded number, and those that were used last."""

import weakref
from types import SimpleNamespace

import pytest

from burst.plan_cache import MAX_PLANS, PlanCache


class Bound(SimpleNamespace):
    """A plan, as far as a cache knows one."""

    slots = frozenset()

    def cancel(self):
        self.is_cancelled = True


@pytest.fixture
def cache():
    """It is full: plans of requests 0 to MAX_PLANS - 1, in this order."""
    found = PlanCache()
    for n in range(MAX_PLANS):
        found.keep(key(n), Bound(slots=frozenset({n})))
    return found


def key(n):
    return n.to_bytes(2, "big")


def test_one_more_replaces_the_one_that_was_not_used_for_longest(cache):
    """All others stay bound: a client with one request too many does not have all of them bound again."""
    assert cache.find(key(0))
    cache.keep(b"another", Bound())
    assert len(cache) == MAX_PLANS
    assert [n for n in range(MAX_PLANS) if not cache.find(key(n))] == [1]


def test_a_request_has_one_plan(cache):
    """One that was bound twice at a time is kept once, and displaces no other."""
    plan = Bound()
    cache.keep(key(7), plan)
    assert cache.find(key(7)) is plan
    assert len(cache) == MAX_PLANS


def test_what_uses_a_slot_goes_with_it(cache):
    """Only that; None means all."""
    cache.forget(frozenset({3, 4, MAX_PLANS}))
    assert [n for n in range(MAX_PLANS) if not cache.find(key(n))] == [3, 4]
    cache.forget(None)
    assert len(cache) == 0


def test_one_plan_is_dropped(cache):
    """By itself, not by its request: that may have another one by now."""
    plan = cache.find(key(3))
    cache.drop(plan)
    assert cache.find(key(3)) is None
    cache.keep(key(3), Bound())
    cache.drop(plan)
    assert len(cache) == MAX_PLANS


def test_what_a_plan_holds_may_use_the_cache_as_it_goes(cache):
    """It is not freed under the cache's lock."""
    plan, seen = Bound(), []
    weakref.finalize(plan, lambda: seen.append(cache.find(key(MAX_PLANS))))
    cache.keep(key(5), plan)
    del plan
    cache.keep(key(5), Bound())
    assert seen == [None]


def test_all_are_cancelled(cache):
    """Each is told to end its run."""
    plans = [cache.find(key(n)) for n in range(MAX_PLANS)]
    cache.cancel()
    assert all(plan.is_cancelled for plan in plans)
