"""One patience: what is waited for follows from the settle time, the step and the context."""

import pytest

from harness.experiments.patience import Patience, prompts_s

NO_LIMIT = 1 << 20


def patience(
    settle_s: float = 2.0,
    steps: int | None = None,
    *,
    step_s: float = 0.01,
    most_tokens: int = NO_LIMIT,
    ttft_s: float = 0.0,
) -> Patience:
    return Patience.of(
        settle_s, steps, step_s=step_s, begin_s=0.3, most_tokens=most_tokens, ttft_s=ttft_s
    )


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.5])
def test_a_stream_that_is_forgotten_outlives_the_wait_for_a_probe(step_s: float) -> None:
    """Whenever it left: even at its 64th token it has more to go than a probe is waited for."""
    one = patience(step_s=step_s)
    assert (one.answer_tokens - 64) * step_s > 2 * one.settle_s
    assert one.probe_s == one.settle_s == 2.0
    assert one.filler_s == pytest.approx(2.3)


@pytest.mark.parametrize("ttft_s", [0.05, 3.0, 8.0])
def test_a_stream_that_fills_a_slot_outlasts_the_first_tokens_of_others(ttft_s: float) -> None:
    """Another stream begins, a probe waits as long as it would on the idle server, and then for a
    slot."""
    one = patience(ttft_s=ttft_s)
    assert one.answer_tokens * 0.01 > 3 * ttft_s + 2 * one.probe_s


def test_a_short_context_shortens_the_wait_for_a_probe_and_no_other() -> None:
    one = patience(most_tokens=150)
    assert one.answer_tokens == 150
    assert one.probe_s == pytest.approx(0.75)
    assert one.filler_s == pytest.approx(2.3)


def test_slow_steps_make_the_settle_time_longer() -> None:
    assert patience(steps=20).settle_s == 2.0
    slow = patience(steps=20, step_s=0.5)
    assert (slow.settle_s, slow.probe_s, slow.filler_s) == (10.0, 10.0, 10.3)


def test_without_a_settle_time_two_seconds_are_waited() -> None:
    assert patience(0.0).probe_s == 2.0
    assert patience(0.0, 20).probe_s == pytest.approx(0.2)


def test_prompts_that_may_not_fit_have_twice_their_time() -> None:
    assert prompts_s(0.5, 0.01) == pytest.approx(1.16)
