"""The report of several arms, from a folder to HTML, read back with a parser."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.store.manifest import Manifest, TargetFacts
from harness.store.run_folder import RunFolder
from tests.dashboards.reading import body_of, decoded, page_of

ITL = [0.005, 0.011, 0.030]
TTFT = [0.640, 0.270, 0.180]
CANCEL = [0.003, 0.006, 0.016]
SIZES = [32, 128, 512]


def metric(value: float, unit: str) -> dict[str, Any]:
    figures = {"mean": value, "p50": value, "p99": 2 * value}
    return {"unit": unit, "n": 9, "method": "exact", **figures}


def difference(arm: str, ratio: float, *, width: float = 0.1) -> dict[str, Any]:
    return {
        "arm": arm,
        "reference": "32",
        "n": 3,
        "difference": -0.4,
        "difference_ci95": [-0.5, -0.3],
        "ratio": ratio,
        "ratio_ci95": [ratio - width, ratio + width],
    }


def arm(index: int) -> dict[str, Any]:
    times = {"itl_s": ITL, "ttft_s": TTFT, "cancel_latency_prefill_s": CANCEL}
    return {
        "outcomes": {"completed": 5, "abandoned": 4},
        "metrics": {name: metric(values[index], "s") for name, values in times.items()}
        | {"preemptions": metric(12.0, "preemptions")},
        "not_measurable": {"gpu_seconds_after_abandon": "no GPU"},
        "per_round": {
            "itl_s": {"p50": [ITL[index], None, 2 * ITL[index]], "p99": [0.1, 0.2, 0.3]},
            "preemptions": {"mean": [10.0, 12.0, 14.0]},
        },
    }


def make_arms(tmp_path: Path, *, kind: str, **changes: Any) -> Path:
    folder = RunFolder.claim(tmp_path / "arms")
    folder.rounds.mkdir()
    names = [str(size) for size in SIZES]
    arms = [
        {"name": name, "engine": {"max_num_batched_tokens": int(name)}, "load": {}}
        for name in names
    ]
    manifest = Manifest(
        run_id="20260102-030405-arms",
        status="complete",
        created_at="2026-01-02T03:04:05Z",
        command=["walkaway", "run", "w"],
        seed=7,
        versions={"python": "3.11"},
        hardware={"cores": 2},
        workload={"question": "Which arm?", "load": {"kind": kind}, "arms": arms},
        settle_s=2.0,
        scrape_interval_s=0.05,
    )
    summary: dict[str, Any] = {
        "schema_version": 1,
        "run_id": "20260102-030405-arms",
        "status": "complete",
        "workload": "w",
        "engine": "reference",
        "model": "tiny",
        "reference": "32",
        "rounds": 3,
        "headlines": ["preemptions"],
        "arms": {name: arm(index) for index, name in enumerate(names)},
        "differences": {
            "preemptions": {"mean": [difference("128", 0.5), difference("512", 0.9, width=0.2)]},
            "itl_s": {"p99": [difference("128", 2.0)]},
        },
        "validity": [{"level": "warning", "text": "too few rounds"}],
    }
    folder.write_manifest(manifest)
    folder.write_summary({**summary, **changes})
    return folder.path


def test_the_arms_stand_side_by_side_with_how_they_differ(tmp_path: Path) -> None:
    page = page_of(make_arms(tmp_path, kind="abandon"))
    body = body_of(page)
    assert page.texts("h1") == ["Which arm?"]
    assert (
        "Against 32, in 3 rounds: 128 has preemptions 0.5 times (0.4 to 0.6); "
        "512 has preemptions 0.9 times (0.7 to 1.1)."
    ) in body
    assert "0.5 times (0.4 to 0.6)" in body
    assert "the reference" in body
    assert "128: engine.max_num_batched_tokens = 128" in body
    assert "3, seeds 8 to 10" in body
    assert "too few rounds" in body
    assert "no GPU" in body
    assert "512: preemptions" in body  # the table of every figure


def test_rounds_are_drawn_for_the_question_and_for_what_differs(tmp_path: Path) -> None:
    figures = page_of(make_arms(tmp_path, kind="abandon")).figures()
    assert set(figures) == {
        "run0-rounds-preemptions-mean",
        "run0-rounds-itl_s-p99",
        "run0-survivors-ttft_s",
        "run0-survivors-itl_s",
    }
    first_token = figures["run0-survivors-ttft_s"]["data"]
    medians = next(one for one in first_token if one.get("name") == "p50")
    assert medians["y"] == ["32", "128", "512"]
    assert decoded(medians["x"]) == pytest.approx([640, 270, 180])
    dots, means = figures["run0-rounds-preemptions-mean"]["data"]
    assert decoded(dots["y"]) == [10, 12, 14] * 3
    assert decoded(means["y"]) == [12, 12, 12]
    # Student's t with two degrees of freedom: 4.303 * 2 / sqrt(3).
    assert decoded(means["error_y"]["array"]) == pytest.approx([4.968] * 3, abs=1e-3)


def test_the_frontier_has_a_point_for_each_chunk_size(tmp_path: Path) -> None:
    page = page_of(make_arms(tmp_path, kind="chunk_frontier"))
    figures = page.figures()
    (points,) = figures["run0-frontier"]["data"]
    assert decoded(points["x"]) == pytest.approx([10, 22, 60])
    assert decoded(points["y"]) == pytest.approx([640, 270, 180])
    assert points["text"] == ["32", "128", "512"]
    medians, upper = figures["run0-frontier-cancel"]["data"]
    assert decoded(medians["x"]) == SIZES
    assert decoded(medians["y"]) == pytest.approx([3, 6, 16])
    assert decoded(upper["y"]) == pytest.approx([6, 12, 32])
    assert (
        "From chunks of 32 tokens to 512, the long prompt's first token comes after 180 ms instead "
        "of 640 ms (medians), and a bystander waits up to 60 ms instead of 10 ms"
    ) in body_of(page)


def test_arms_without_figures_are_said_to_have_none(tmp_path: Path) -> None:
    nothing: dict[str, Any] = {"outcomes": {}, "metrics": {}, "not_measurable": {}, "per_round": {}}
    page = page_of(
        make_arms(
            tmp_path,
            kind="chunk_frontier",
            arms=dict.fromkeys(("32", "128", "512"), nothing),
            differences={},
        )
    )
    assert page.figures() == {}
    assert "No request was made, so there is nothing to tell." in body_of(page)


def test_arms_and_a_plain_run_fit_on_one_page(tmp_path: Path, make_run: Any) -> None:
    page = page_of(make_arms(tmp_path, kind="abandon"), make_run(name="plain"))
    assert page.texts("h1") == ["2 runs, side by side"]
    assert "run1-stages" in page.figures()


def save_rounds(run: Path, lags_s: dict[str, float]) -> None:
    """A round of each of these names, whose client noticed its ticks so late."""
    for slots, (name, lag_s) in enumerate(lags_s.items(), start=8):
        folder = RunFolder.claim(run / "rounds" / name)
        manifest = msgspec.convert(RunFolder(run).read_manifest(), Manifest)
        config = {"runner": "simulated", "max_num_seqs": slots, "num_blocks": 512}
        target = TargetFacts(
            engine="reference",
            url="http://test",
            metrics_urls=[],
            model="tiny",
            started_by_us=True,
            spec={},
            config=config,
        )
        folder.write_manifest(msgspec.structs.replace(manifest, target=target))
        side = {"host": "h", "pid": 1, "cpu_share": 0.25, "lag_p95_s": lag_s}
        folder.write_summary(
            {
                "run_id": name,
                "status": "complete",
                "workload": "w",
                "engine": "reference",
                "model": "tiny",
                "outcomes": {"completed": 5},
                "load_processes": [side],
                "steady": {
                    "is_steady": True,
                    "rule": "MSER-5",
                    "warmup_s": 0.1,
                    "steady_tps": 400.0,
                },
            }
        )


def test_each_arm_says_how_far_to_trust_it_by_its_worst_round(tmp_path: Path) -> None:
    run = make_arms(tmp_path, kind="abandon")
    save_rounds(run, {"1-32": 0.001, "1-128": 0.002, "2-32": 0.004, "2-128": 0.3})
    body = body_of(page_of(run))
    used = "in its worst ten seconds 25 % of a core, and 5 % of its ticks noticed over"
    assert f"client, 32good not saturated: {used} 1 ms late (in 1-32)" in body
    assert f"client, 128not good saturated: {used} 300 ms late (in 2-128)" in body
    assert "window, 128good steady after 100 ms" in body
    assert "128: client saturated" in body
    assert "32: client" not in body  # that it is good need not be said on the first screen
    assert "· window steady ·" in body  # of all arms: said once
    assert "reference, simulated runner, 512 KV blocks" in body  # they differ in their slots


def test_an_invalid_run_of_arms_says_no_ratio_before_that(tmp_path: Path) -> None:
    invalid = [{"level": "invalid", "text": "the load could not keep up"}]
    body = body_of(page_of(make_arms(tmp_path, kind="abandon", validity=invalid)))
    assert "Against 32" not in body
    assert body.index("the load could not keep up") < body.index("times")
    assert body.index("The arms side by side") < body.index("What was run on what")


def test_one_round_has_one_seed(tmp_path: Path) -> None:
    assert "1, seed 8" in body_of(page_of(make_arms(tmp_path, kind="abandon", rounds=1)))
