"""The sentences and the cards: every kind of run gets words that are true of it."""

from typing import Any, Final

import numpy as np

from dashboards.headline import cards, without_praise
from harness.analysis.black_box import Ghosts, ghost_rate
from harness.analysis.figure import Sample, describe, rate
from harness.records import Metric
from harness.text.headlines import (
    HEADLINES,
    brief_sentences,
    headline_sentences,
    report_sentence,
)
from tests.conftest import Snapshot

LEFT: Final = {"abandoned": 100, "completed": 5}
NONE: Final = {"ghost_rate": Metric(unit="ratio", n=93, mean=0.0, upper95=0.03, method="exact")}
SOME: Final = {"ghost_rate": Metric(unit="ratio", n=100, mean=0.03, upper95=0.08, method="exact")}
CLEAN: Final = {
    "leaked_slots": Metric(unit="slots", n=1, mean=0.0, method="gauge"),
    "leaked_blocks": Metric(unit="blocks", n=1, mean=0.0, method="gauge"),
}
LEAKED: Final = {
    "leaked_slots": Metric(unit="slots", n=1, mean=8.0, method="gauge"),
    "leaked_blocks": Metric(unit="blocks", n=1, mean=181.0, method="gauge"),
}


def seconds(p50: float | None, p99: float | None, **more: Any) -> Metric:
    return Metric(unit="s", n=100, p50=p50, p99=p99, **{"method": "exact", **more})


def tokens(mean: float, **more: Any) -> Metric:
    return Metric(unit="tokens", n=62, mean=mean, **{"method": "exact", **more})


def by_gauge(**more: Any) -> dict[str, Metric]:
    return {"cancel_latency_s": Metric(unit="s", n=20, method="gauge", **more)}


def ghosts(low: int, **more: Any) -> dict[str, Metric]:
    return {"ghost_rate": ghost_rate([Ghosts(n=51, low=low, **more)], "gauge")}


def prompts(mean: float, limits: tuple[float, float] | None = None) -> dict[str, Metric]:
    return {"wasted_prompt_tokens": tokens(mean, mean_ci95=limits, method="counter")}


# Watched for too short a time: nothing is known, and the server is not accused.
UNKNOWN: Final = describe(
    Sample(values=np.full(6, 0.02), censored=np.full(6, fill_value=True)),
    unit="s",
    method="gauge",
    bound="upper",
)
CASES: Final[dict[str, tuple[dict[str, Metric], dict[str, Any]]]] = {
    "a good server": (
        {
            "cancel_latency_s": seconds(0.0123, 0.045),
            "cancel_latency_steps": Metric(unit="steps", n=100, p50=1, p99=2, method="exact"),
            "removed_at_first_boundary": Metric(
                unit="ratio", n=500, mean=1.0, lower95=0.994, method="exact"
            ),
            "wasted_tokens": tokens(1.9),
            **NONE,
            **CLEAN,
        },
        {},
    ),
    "ghosts and lost slots": (
        {
            "cancel_latency_s": seconds(0.0123, None, lower_bounds={"p99": 2.0}, n_censored=3),
            **SOME,
            **LEAKED,
        },
        {"lost": ("slots", "blocks")},
    ),
    "a median among the ghosts": (
        {"cancel_latency_s": seconds(None, None, lower_bounds={"p50": 2.0}, n_censored=60)},
        {},
    ),
    "perhaps ghosts": (NONE, {"unsure": 2}),
    "ghosts, and perhaps more": (SOME, {"unsure": 2}),
    "ghosts hold it all": (LEAKED, {"in_use": {"slots": 8.0, "blocks": 181.0}}),
    "ghosts hold some": (LEAKED, {"in_use": {"slots": 8.0, "blocks": 100.0}, "lost": ["blocks"]}),
    "held for an unknown reason": ({"leaked_slots": LEAKED["leaked_slots"]}, {}),
    "only slots are known": ({"leaked_slots": CLEAN["leaked_slots"]}, {}),
    "a mean without quantiles": (by_gauge(mean=0.12, mean_ci95=(0.1, 0.14)), {}),
    "a limit of the mean": (by_gauge(upper95=0.03, bound="upper"), {}),
    "limits of quantiles": (by_gauge(p50=0.03, p99=0.05, bound="upper"), {}),
    "a limit that is not known": ({"cancel_latency_s": UNKNOWN}, {}),
    "a gauge of 0": (ghosts(0), {}),
    "a gauge of 2": (ghosts(2), {}),
    "a gauge of 2, or lost slots": (ghosts(2, lost_slots=None), {}),
    "all ghosts are known": ({"ghost_rate": rate(51, 51, method="probe")}, {}),
    "prompts computed in vain": (prompts(378.0), {}),
    "perhaps no prompt in vain": (prompts(378.0, (-40.0, 800.0)), {}),
    "no prompt in vain": (prompts(-3.0), {}),
    "waste by a counter": (
        {"wasted_tokens": tokens(3.0, method="counter", bound="lower", others={"cut_off": 12})},
        {},
    ),
    "recovery alone": ({"slot_recovery_s": seconds(0.061, 0.08, method="probe")}, {}),
    "recovery and other waits": (
        {
            "slot_recovery_s": seconds(0.061, 0.08, method="probe", n_censored=1),
            "probe_ttft_unloaded_s": seconds(0.008, 0.01),
            "probe_ttft_control_s": seconds(1.2, 1.3),
        },
        {},
    ),
    "nothing measured": ({}, {}),
}


def test_every_kind_of_run_gets_words_that_are_true_of_it(snapshot: Snapshot) -> None:
    lines = []
    for name, (metrics, more) in CASES.items():
        lines += [name, f"  {report_sentence(LEFT, metrics, **more)}"]
        known = {key: more[key] for key in ("in_use", "unsure") if key in more}
        for card in cards(metrics, {}, **known).values():
            clean = {True: ", clean", False: ", unclean", None: ""}[card.is_clean]
            lines.append(f"  {card.label}{clean}: {card.value}: {'; '.join(card.details)}")
            lines.append(f"    good: {card.good}")
    snapshot("headlines", "\n".join(lines) + "\n")


def test_without_requests_or_abandons_nothing_is_said_of_cancellation() -> None:
    assert report_sentence({"completed": 3}, {}).startswith("No user left early")
    assert report_sentence({"completed": 0}, {}).startswith("No request was made")


def test_a_missing_headline_is_named_with_its_reason() -> None:
    assert headline_sentences({"cancel_latency_s": UNKNOWN}, {"wasted_tokens": "no counter"}) == [
        "Cancel latency is not measurable here: the run gives no data for it.",
        "Wasted tokens are not measurable here: no counter. A metrics page with the tokens that it "
        "generated shows it (--metrics-url).",
        "Slot recovery is not measurable here: the run gives no data for it.",
    ]


def test_on_the_terminal_a_server_that_hides_all_three_has_one_sentence() -> None:
    hidden = dict.fromkeys(HEADLINES, "no log")
    (said,) = brief_sentences({}, hidden)
    assert said.endswith("`walkaway run slot_recovery`, with the same flags, sends them.")
    (said,) = brief_sentences({}, hidden, can_probe=False)
    assert said.endswith("and this run has no probes.")
    nobody = hidden | {"cancel_latency_s": "no request was abandoned"}
    assert brief_sentences({}, nobody) == headline_sentences({}, nobody)


def test_a_run_that_shows_no_good_is_not_praised_but_blamed() -> None:
    found = without_praise(cards(SOME | CLEAN, {}))
    assert {card.label: card.is_clean for card in found.values()} == {
        "Ghosts": False,
        "Leaked": None,
    }


def test_a_figure_below_the_floor_carries_its_flag() -> None:
    metrics = {"ttft_s": seconds(0.0001, 0.001), "slot_refill_s": seconds(0.1, 0.2)}
    refill, ttft = cards(metrics, {"ttft_s": "the client was late"}).values()
    assert (refill.flag, ttft.flag) == (None, "the client was late")
