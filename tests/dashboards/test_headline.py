"""The sentence and the cards: every kind of run gets words that are true of it."""

import numpy as np
import pytest

from dashboards.headline import cards, sentence, without_praise
from harness.analysis.figure import Sample, describe
from harness.analysis.ghosts import Ghosts, ghost_rate
from harness.records import Metric


def seconds(p50: float | None, p99: float | None, **more: object) -> Metric:
    return Metric(unit="s", n=100, p50=p50, p99=p99, method="exact", **more)  # type: ignore[arg-type]


def rate(mean: float, *, n: int) -> Metric:
    return Metric(unit="ratio", n=n, mean=mean, upper95=0.03, method="exact")


def gauge(unit: str, value: float) -> Metric:
    return Metric(unit=unit, n=1, mean=value, method="gauge")


LEFT = {"abandoned": 100, "completed": 5}


def test_a_good_server() -> None:
    metrics = {
        "cancel_latency_s": seconds(0.0123, 0.045),
        "wasted_tokens": Metric(unit="tokens", n=100, mean=1.9, method="exact"),
        "ghost_rate": rate(0.0, n=100),
        "leaked_slots": gauge("slots", 0.0),
        "leaked_blocks": gauge("blocks", 0.0),
    }
    assert sentence(LEFT, metrics) == (
        "When a user left, the server let go after 12.3 ms (median; 99 % within 45 ms). "
        "It generated 1.9 tokens per abandon that no client read. "
        "All 100 abandoned requests were stopped. Nothing leaked."
    )
    assert {card.label: card.is_clean for card in cards(metrics, {})} == {
        "Cancel latency": None,
        "Wasted tokens": None,
        "Ghosts": True,
        "Leaked": True,
    }


def test_ghosts_and_leaks_are_said() -> None:
    metrics = {
        "cancel_latency_s": seconds(0.0123, None, lower_bounds={"p99": 2.0}, n_censored=3),
        "ghost_rate": rate(0.03, n=100),
        "leaked_slots": gauge("slots", 1.0),
        "leaked_blocks": gauge("blocks", 12.0),
    }
    text = sentence(LEFT, metrics, lost=("slots", "blocks"))
    assert "some requests were not stopped while they were watched" in text
    assert "3 of 100 abandoned requests went on as if their users had stayed." in text
    assert "1 slot and 12 blocks never came back." in text
    assert [card.is_clean for card in cards(metrics, {})] == [None, False, False]


def test_requests_that_may_be_ghosts_or_not_are_counted() -> None:
    none = {"ghost_rate": rate(0.0, n=93)}
    assert sentence(LEFT, none, unsure=2) == (
        "93 of 95 abandoned requests were stopped, 2 undecided."
    )
    (card,) = cards(none, {}, unsure=2)
    assert (card.value, card.is_clean) == ("0", None)
    assert "2 more undecided" in card.details
    some = {"ghost_rate": rate(0.03, n=100)}
    assert sentence(LEFT, some, unsure=2) == (
        "3 of 100 abandoned requests went on as if their users had stayed; 2 more undecided."
    )
    assert [card.is_clean for card in cards(some, {}, unsure=2)] == [False]


def test_a_run_that_shows_no_good_is_not_praised_but_blamed() -> None:
    metrics = {"ghost_rate": rate(0.03, n=100), "leaked_slots": gauge("slots", 0.0)}
    found = without_praise(cards(metrics, {}))
    assert {card.label: card.is_clean for card in found} == {"Ghosts": False, "Leaked": None}


def test_what_ghosts_hold_is_not_said_to_be_lost() -> None:
    metrics = {"leaked_slots": gauge("slots", 8.0), "leaked_blocks": gauge("blocks", 181.0)}
    in_use = {"slots": 8.0, "blocks": 181.0}
    assert sentence(LEFT, metrics, in_use) == (
        "8 slots and 181 blocks are still held by requests whose users have gone."
    )
    (card,) = cards(metrics, {}, in_use)
    assert card.value == "8 slots, 181 blocks"
    assert "8 slots and 181 blocks of these held by requests that still run (ghosts)" in (
        card.details
    )
    assert sentence(LEFT, metrics, {"slots": 8.0, "blocks": 100.0}, ["blocks"]).endswith(
        "8 slots and 100 blocks are still held by requests whose users have gone. "
        "81 blocks never came back."
    )


def test_without_proof_of_a_loss_slots_are_still_held() -> None:
    metrics = {"leaked_slots": gauge("slots", 4.0)}
    assert sentence(LEFT, metrics) == "4 slots are still held after the settle time."


def test_a_mean_without_quantiles_is_no_ghost() -> None:
    mean = Metric(unit="s", n=20, mean=0.12, mean_ci95=(0.1, 0.14), method="gauge")
    metrics = {"cancel_latency_s": mean, "ghost_rate": rate(0.0, n=20)}
    assert sentence(LEFT, metrics) == (
        "When a user left, the server let go after 120 ms on average (95 % interval 100 to 140 ms)."
        " All 20 abandoned requests were stopped."
    )
    card = cards(metrics, {})[0]
    assert card.value == "120 ms"
    assert card.details == ("mean of 20, from totals", "mean's 95 % interval 100 to 140 ms")


def test_a_mean_that_is_only_known_to_be_small_is_said_to_be() -> None:
    most = Metric(unit="s", n=20, upper95=0.03, method="gauge", bound="upper")
    metrics = {"cancel_latency_s": most}
    assert sentence(LEFT, metrics).endswith("let go after at most 30 ms on average.")
    assert cards(metrics, {})[0].value == "\N{LESS-THAN OR EQUAL TO} 30 ms"


def test_a_limit_that_is_not_known_accuses_nobody() -> None:
    """Requests that were watched for too short a time."""
    sample = Sample(values=np.full(6, 0.02), censored=np.full(6, fill_value=True))
    unknown = describe(sample, unit="s", method="gauge", bound="upper")
    assert "not stopped" not in sentence(LEFT, {"cancel_latency_s": unknown})


def test_a_gauge_of_0_does_not_say_that_all_were_stopped() -> None:
    ghosts = ghost_rate([Ghosts(n=51, low=0, high=None)], "gauge")
    assert sentence(LEFT, {"ghost_rate": ghosts}) == (
        "None of the 51 requests left was still there after the settle time."
    )
    (card,) = cards({"ghost_rate": ghosts}, {})
    assert (card.value, card.is_clean) == ("none seen", None)
    assert not [line for line in card.details if "at most" in line]
    some = ghost_rate([Ghosts(n=51, low=2, high=None)], "gauge")
    assert "At least 2 of 51 requests left went on" in sentence(LEFT, {"ghost_rate": some})
    either = ghost_rate([Ghosts(n=51, low=2, high=None, lost_slots=None)], "gauge")
    assert sentence(LEFT, {"ghost_rate": either}).endswith("or their slots are lost.")
    all_known = ghost_rate([Ghosts(n=51, low=51, high=51)], "counter")
    assert sentence(LEFT, {"ghost_rate": all_known}) == (
        "51 of 51 requests left went on as if their users had stayed."
    )


def test_an_upper_limit_of_each_latency_is_said_to_be_one() -> None:
    most = Metric(unit="s", n=20, p50=0.03, p99=0.05, method="gauge", bound="upper")
    metrics = {"cancel_latency_s": most}
    assert "let go after at most 30 ms (median; 99 % within 50 ms)" in sentence(LEFT, metrics)
    assert cards(metrics, {})[0].value == "\N{LESS-THAN OR EQUAL TO} 30 ms"


@pytest.mark.parametrize(
    ("mean", "interval", "is_said"),
    [(378.0, None, True), (378.0, (-40.0, 800.0), False), (0.0, None, False), (-3.0, None, False)],
)
def test_prompts_that_were_computed_in_vain_are_told(
    mean: float, interval: tuple[float, float] | None, is_said: bool
) -> None:
    wasted = Metric(unit="tokens", n=68, mean=mean, mean_ci95=interval, method="counter")
    said = sentence(LEFT, {"wasted_prompt_tokens": wasted})
    assert ("It computed 378 tokens of each prompt that was left before" in said) is is_said


def test_waste_by_a_counter_is_of_all_requests_left() -> None:
    others = {"cut_off": 12}
    wasted = Metric(unit="tokens", n=62, mean=3.0, method="counter", others=others)
    assert "3 tokens per request left that no client read" in sentence(
        LEFT, {"wasted_tokens": wasted}
    )
    (card,) = cards({"wasted_tokens": wasted}, {})
    assert card.details[0] == "mean per request left, of 62; the run cut off 12 of these"


def test_only_what_is_known_is_asked_to_be_nothing() -> None:
    (card,) = cards({"leaked_slots": gauge("slots", 0.0)}, {})
    assert card.good == "0 slots missing once everything is idle again."


def test_a_share_that_ought_to_be_all_says_how_much_is_sure() -> None:
    at_once = Metric(unit="ratio", n=500, mean=1.0, lower95=0.994, method="exact")
    metrics = {"cancel_latency_s": seconds(0.01, 0.02), "removed_at_first_boundary": at_once}
    (card,) = cards(metrics, {})
    assert "100 % (at least 99.4 %) removed at the first step boundary" in card.details


def test_a_median_among_the_ghosts_is_no_number() -> None:
    metrics = {"cancel_latency_s": seconds(None, None, lower_bounds={"p50": 2.0})}
    assert "More than half" in sentence(LEFT, metrics)
    assert cards(metrics, {})[0].value == "> 2 s"


def test_a_lower_bound_is_called_one() -> None:
    wasted = Metric(unit="tokens", n=100, mean=3.0, method="counter", bound="lower")
    assert "at least 3 tokens" in sentence(LEFT, {"wasted_tokens": wasted})
    assert cards({"wasted_tokens": wasted}, {})[0].value == "\N{GREATER-THAN OR EQUAL TO} 3"


def test_black_box_runs_speak_of_recovery_only() -> None:
    metrics = {"slot_recovery_s": seconds(0.061, 0.08)}
    assert sentence(LEFT, metrics) == (
        "The next in the queue saw a first token 61 ms after a user had left (median)."
    )
    metrics["probe_ttft_control_s"] = seconds(1.2, 1.3)
    assert sentence(LEFT, metrics).endswith(
        "(median), against 1.2 s without abandons, when a stream must end by itself."
    )


def test_a_figure_below_the_floor_carries_its_flag() -> None:
    metrics = {"ttft_s": seconds(0.0001, 0.001), "slot_refill_s": seconds(0.1, 0.2)}
    refill, ttft = cards(metrics, {"ttft_s": "the client was late"})
    assert (refill.flag, ttft.flag) == (None, "the client was late")


def test_nothing_measured_is_never_zero() -> None:
    assert "does not show what happened" in sentence(LEFT, {})
    assert sentence({"completed": 3}, {}).startswith("No user left early")
    assert sentence({"completed": 0}, {}).startswith("No request was made")
    assert cards({}, {}) == []
