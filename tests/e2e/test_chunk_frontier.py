"""The chunk frontier on the bundled engine: the roles in the rows, and the effect of chunk size."""

from statistics import median

import pytest

from tests.e2e.running import Log, Run, measure_arms, set_flags

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAIRS = 8
ARMS = '[{name="64", engine={max_num_batched_tokens=64}},{name="1024", engine={}}]'


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = set_flags(
        f"load.pairs={PAIRS}",
        "run.rounds=1",
        f"arms={ARMS}",
        "engine.max_num_batched_tokens=1024",
    )
    return measure_arms("chunk_frontier", tmp_path_factory.mktemp("frontier") / "run", *settings)


def test_rows_tell_the_three_kinds_apart(parent: Run) -> None:
    for arm in ("64", "1024"):
        rows = [row for row in parent.rows("requests") if row["arm"] == arm]
        long = [row for row in rows if row["role"] == "long_prompt"]
        read = [row for row in long if row["planned_abandon"] is None]
        left = [row for row in long if row["planned_abandon"] == 0]
        assert [row["outcome"] for row in read] == ["completed"] * PAIRS
        assert [row["outcome"] for row in left] == ["abandoned"] * PAIRS
        assert {row["tokens_read"] for row in read} == {4}
        assert all(row["prompt_tokens"] > 2700 for row in read)
        bystanders = [row for row in rows if row["role"] == "bystander"]
        assert {row["user"] for row in bystanders} == {1, 2, 3, 4}
        assert len(rows) == len(long) + len(bystanders)


def test_those_who_left_did_so_during_their_prefill(parent: Run) -> None:
    for name, arm in parent.summary["arms"].items():
        log = Log(of_arm(parent, name))
        prefills = [log.is_in_prefill_at(t0, of) for of, t0 in log.left_ns.items()]
        assert arm["metrics"]["cancel_latency_prefill_s"]["n"] == sum(prefills) > PAIRS / 2
        assert arm["metrics"]["ghost_rate"]["mean"] == 0


def test_each_figure_is_of_one_kind_and_says_of_which(parent: Run) -> None:
    for arm in parent.summary["arms"].values():
        assert arm["metrics"]["itl_s"]["of"] == "bystanders"
        assert arm["metrics"]["ttft_s"]["of"] == "long prompts that were read"
        assert arm["metrics"]["ttft_s"]["n"] == PAIRS


def test_larger_chunks_serve_the_long_prompt_and_cost_the_bystanders(parent: Run) -> None:
    small, large = (
        parent.summary["arms"]["64"]["metrics"],
        parent.summary["arms"]["1024"]["metrics"],
    )
    assert large["ttft_s"]["p50"] < small["ttft_s"]["p50"]
    assert tokens_beside_a_prefill(parent, "64") > 3 * tokens_beside_a_prefill(parent, "1024")
    assert full_step_ns(parent, 1024) > 3 * full_step_ns(parent, 64)


def of_arm(parent: Run, name: str) -> Run:
    """The arm's run in the only round."""
    return Run(parent.folder / "rounds" / f"1-{name}")


def full_step_ns(parent: Run, budget: int) -> float:
    """How long a step typically takes that has no room left, as beside a long prompt: all who
    decode wait for it."""
    took: list[int] = [
        step["ended_ns"] - step["started_ns"]
        for step in of_arm(parent, str(budget)).rows("steps")
        if sum(step["scheduled_tokens"]) == budget
    ]
    return median(took)


def tokens_beside_a_prefill(run: Run, arm: str) -> float:
    """How many tokens a bystander typically reads while a long prompt waits for its first."""
    rows = [row for row in run.rows("requests") if row["arm"] == arm]
    waits = [
        (row["sent_ns"], row["first_token_ns"])
        for row in rows
        if row["role"] == "long_prompt" and row["first_token_ns"] is not None
    ]
    bystanders: dict[int, list[int]] = {}
    for row in rows:
        if row["role"] == "bystander":
            bystanders.setdefault(row["user"], []).extend(row["token_times_ns"])
    read: list[int] = [
        sum(sent < t <= first for t in times)
        for times in bystanders.values()
        for sent, first in waits
    ]
    return median(read)
