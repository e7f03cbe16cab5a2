import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.config import RateLimits
from reference_engine.serve.access import MAX_OWNERS, RateLimiter

SECOND_NS = 10**9


def limiter(**limits: int | bool) -> RateLimiter:
    return RateLimiter(RateLimits(**limits))  # type: ignore[arg-type]


def test_without_limits_everybody_gets_what_they_want() -> None:
    unlimited = limiter()
    assert all(unlimited.admit("k", 0) is None for _ in range(10_000))
    assert not unlimited.spend("k", 10**9, 0)
    assert unlimited.admit("k", 0) is None


def test_a_minutes_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    six = limiter(requests_per_minute=6)
    assert [six.admit("k", 0) for _ in range(6)] == [None] * 6
    assert six.admit("k", 0) == pytest.approx(10.0)
    assert six.admit("k", 4 * SECOND_NS) == pytest.approx(6.0)
    assert six.admit("k", 10 * SECOND_NS) is None
    assert six.admit("k", 10 * SECOND_NS) == pytest.approx(10.0)


def test_what_is_refused_is_not_counted() -> None:
    one = limiter(requests_per_minute=1)
    assert one.admit("k", 0) is None
    assert [one.admit("k", 30 * SECOND_NS) for _ in range(5)] == [pytest.approx(30.0)] * 5


def test_tokens_are_taken_when_they_are_there_and_block_the_next_request() -> None:
    tokens = limiter(tokens_per_minute=60)
    assert tokens.admit("k", 0) is None
    assert not tokens.spend("k", 90, 0), "without the policy nobody is cancelled"
    assert tokens.admit("k", 0) == pytest.approx(31.0), "30 in debt, and one is needed"
    assert tokens.admit("k", 31 * SECOND_NS) is None


def test_with_the_policy_who_is_over_the_limit_is_cancelled() -> None:
    tokens = limiter(tokens_per_minute=60, kills=True)
    assert not tokens.spend("k", 60, 0)
    assert tokens.spend("k", 1, 0)
    assert not tokens.spend("k", 1, 2 * SECOND_NS)


def test_owners_do_not_pay_for_each_other() -> None:
    one = limiter(requests_per_minute=1)
    assert [one.admit(owner, 0) for owner in ("a", "b", None)] == [None, None, None]
    assert one.admit("a", 0) is not None


def test_the_memory_of_owners_is_bounded_and_the_longest_unheard_of_go() -> None:
    one = limiter(requests_per_minute=1)
    for number in range(MAX_OWNERS):
        one.admit(str(number), 0)
    one.admit("0", 0)
    one.admit("another", 0)
    assert len(one) == MAX_OWNERS
    assert one.admit("0", 0) is not None, "heard of lately, so it is remembered"
    assert one.admit("1", 0) is None, "forgotten"


@given(
    per_minute=st.integers(1, 1000),
    waits_ms=st.lists(st.integers(0, 10_000), min_size=1, max_size=200),
)
def test_never_more_than_the_bucket_and_what_flows_in(per_minute: int, waits_ms: list[int]) -> None:
    some, now_ns, admitted = limiter(requests_per_minute=per_minute), 0, 0
    for wait_ms in waits_ms:
        now_ns += wait_ms * 1_000_000
        wait_s = some.admit("k", now_ns)
        admitted += wait_s is None
        assert wait_s is None or 0 < wait_s <= 60 / per_minute + 1e-6
    assert admitted <= per_minute * (1 + now_ns / (60 * SECOND_NS)) + 1e-6
