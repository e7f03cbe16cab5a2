"""Every way to leave, against the bundled engine: what the ENGINE saw of it.

The client is the load's own. The engine waits less long for a client that is silent (0.5 s) or
reads nothing (2 s) than it would by default (10 s), and holds less for it.
"""

import json
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import httpx
import pytest

from harness.load.client import StreamClient
from harness.records import Delivery, Outcome, RequestRow, Way, WireClose
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.plan import LoadPlan
from harness.workload.workload import RunSettings, load_target
from tests.e2e.running import Log, Run, measure
from tests.harness.workload.mixes import STAY, load_of
from tests.reference_engine.running_engine import RunningEngine, running

pytestmark = pytest.mark.e2e

STEP_MS = 5
STEP_NS = STEP_MS * 1_000_000
FLAGS = (
    *("--runner", "simulated", "--sim-fixed-ms", str(STEP_MS), "--max-num-seqs", "4"),
    *("--heartbeat-s", "0.2", "--ack-timeout-s", "0.5", "--stall-timeout-s", "2"),
    *("--send-buffer-bytes", "4096"),
)
CANCELLATIONS = "walkaway_engine_cancellations_total"
NUMBERS = count()
MAX_TOKENS = 3000


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running(*FLAGS) as engine:
        yield engine


class Leaver:
    """The load's client, asking one thing at a time."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine
        plan = LoadPlan(
            url=engine.url,
            model="tiny",
            target=load_target("reference"),
            run=RunSettings(users=1, timeout_s=10, max_seconds=60),
            load=load_of(STAY, think="none"),
        )
        self.client = StreamClient(plan, api_key=None)

    def leave(self, rule: LeaveRule, *, max_tokens: int = MAX_TOKENS, **leaving: Any) -> RequestRow:
        """The row of one request that was left as the fields of its spec say."""
        rows: list[RequestRow] = []
        spec = RequestSpec(
            request_id=f"leaver-{next(NUMBERS)}",
            arm="main",
            user=0,
            max_tokens=max_tokens,
            prompt_tokens=8,
            intended_start_ns=time.perf_counter_ns(),
            **leaving,
        )
        self.client.ask(spec, f"hello {spec.request_id}", rule, rows.append)
        return rows[0]


@pytest.fixture
def leaver(engine: RunningEngine) -> Iterator[Leaver]:
    leaver = Leaver(engine)
    yield leaver
    leaver.client.close()


def after(tokens: int, *, think_ns: int = 0) -> LeaveRule:
    return lambda read: think_ns if read >= tokens else None


def cancelled(engine: RunningEngine, *, method: str) -> float:
    """How often the engine has cancelled something because of this; 0 before the first time."""
    try:
        return engine.metric(CANCELLATIONS, method=method)
    except AssertionError:
        return 0


def steps_for_nobody(engine: RunningEngine, client_request_id: str) -> list[int]:
    """Those of a request that began after the worker had heard of its abort."""
    gone = engine.wait_for("disconnected", client_request_id)
    heard = engine.wait_for("abort_received", client_request_id)
    page = httpx.get(f"{engine.url}/walkaway/steps", params={"after": gone["step"]})
    return [
        step["step"]
        for step in map(json.loads, page.text.splitlines())
        if heard["request_id"] in step["scheduled"] and step["started_ns"] > heard["t_ns"]
    ]


@pytest.mark.parametrize(
    ("way", "wire_close", "method"),
    [
        (Way.FIN, WireClose.FIN, "connection"),
        (Way.RST, WireClose.RST, "connection"),
        (Way.HALF_CLOSE, WireClose.FIN, "connection"),
        (Way.KILLED, WireClose.KERNEL, "connection"),
        (Way.CANCEL, WireClose.NOTHING, "none"),
        (Way.STOP_READING, WireClose.NOTHING, "stall"),
        (Way.VANISH, WireClose.SILENCE, "heartbeat"),
    ],
)
def test_a_stream(
    engine: RunningEngine, leaver: Leaver, way: Way, wire_close: WireClose, method: str
) -> None:
    before = cancelled(engine, method=method)
    row = leaver.leave(after(5, think_ns=STEP_NS // 2), way=way, planned_abandon=5)
    freed = engine.wait_for("blocks_freed", row.request_id)

    assert (row.outcome, row.wire_close) == (Outcome.ABANDONED, wire_close)
    assert 5 <= row.tokens_read <= freed["num_generated"]
    assert row.abandoned_ns is not None
    assert row.abandoned_ns < freed["t_ns"]
    order = engine.order(row.request_id)
    assert ("disconnected" in order) == (way is not Way.CANCEL)
    assert order.count("abort_sent") == order.count("finished") == 1
    finished = engine.wait_for("finished", row.request_id)
    assert finished["reason"] == "abort"
    assert cancelled(engine, method=method) == before + 1
    if way in (Way.HALF_CLOSE, Way.CANCEL):
        assert row.tokens_after_leaving is not None
        assert row.tokens_after_leaving <= freed["num_generated"] - row.tokens_read
        assert row.server_ended_ns is not None
    if way is Way.CANCEL:
        assert row.finish_reason == "abort"


IN_ONE_PIECE: dict[str, Any] = {"planned_abandon": 0, "delivery": Delivery.UNARY}


def test_an_answer_in_one_piece(engine: RunningEngine, leaver: Leaver) -> None:
    before = cancelled(engine, method="connection")
    row = leaver.leave(after(0, think_ns=20 * STEP_NS), way=Way.FIN, **IN_ONE_PIECE)
    next_one = leaver.leave(after(10**6), max_tokens=1)
    freed = engine.wait_for("blocks_freed", row.request_id)
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 0)
    assert row.abandoned_ns is not None
    assert row.abandoned_ns - row.sent_ns >= 20 * STEP_NS
    assert freed["num_generated"] < MAX_TOKENS, "it did not run to its end"
    admitted = engine.wait_for("admitted", next_one.request_id)
    assert freed["seq"] < admitted["seq"], "it was gone before the next one was let in"
    assert steps_for_nobody(engine, row.request_id) == []
    assert cancelled(engine, method="connection") == before + 1


def test_an_answer_in_one_piece_that_is_cancelled(engine: RunningEngine, leaver: Leaver) -> None:
    row = leaver.leave(after(0, think_ns=20 * STEP_NS), way=Way.CANCEL, **IN_ONE_PIECE)
    freed = engine.wait_for("blocks_freed", row.request_id)
    assert (row.outcome, row.finish_reason, row.error) == (Outcome.ABANDONED, "abort", None)
    assert row.tokens_after_leaving == freed["num_generated"]  # what there was is sent


def test_several_answers_end_together(engine: RunningEngine, leaver: Leaver) -> None:
    row = leaver.leave(after(10), way=Way.RST, planned_abandon=10, n=3)
    ended: list[int] = []
    while len(ended) < 3:
        ended = [
            event["num_generated"]
            for event in engine.events()
            if (event["client_request_id"], event["event"]) == (row.request_id, "blocks_freed")
        ]
    assert row.outcome is Outcome.ABANDONED
    assert 10 <= row.tokens_read <= sum(ended)


def test_several_answers_read_to_the_end(leaver: Leaver) -> None:
    row = leaver.leave(after(10**6), n=3, max_tokens=7)
    assert (row.outcome, row.tokens_read, row.completion_tokens) == (Outcome.COMPLETED, 21, 21)


def test_while_it_is_queued(engine: RunningEngine, leaver: Leaver) -> None:
    """One reader holds all four slots: a request that comes and goes is never admitted."""
    in_the_way = Leaver(engine)
    rows: list[RequestRow] = []

    def look_who_else_comes(tokens_read: int) -> int | None:
        if tokens_read < 4:
            return None
        rows.append(leaver.leave(after(0, think_ns=4 * STEP_NS), way=Way.FIN))
        return 0

    in_the_way.leave(look_who_else_comes, way=Way.FIN, n=4)
    (row,) = rows
    engine.wait_for("finished", row.request_id)
    assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 0)
    assert "admitted" not in engine.order(row.request_id)


WORKLOAD = """
question = "Does the whole chain know them all?"
[run]
seed = 5
users = 10
max_seconds = 30
timeout_s = 5
[load]
kind = "abandon"
stay_share = 0.1
prompt_tokens = [8, 16]
answer_tokens = 2000
stay_tokens = 16
stop_after_abandons = 150
mix = [
    { plan = "tokens", tokens = [1, 16] },
    { plan = "tokens_uniform", lowest = 1, highest = 20, way = "rst" },
    { plan = "tokens_geometric", mean = 8, way = "half_close" },
    { plan = "tokens_lognormal", median = 8, sigma = 0.5, way = "killed" },
    { plan = "tokens_from_file", file = "seen.csv", column = "tokens" },
    { plan = "answer_share", share = [0.002, 0.01] },
    { plan = "time", seconds = [0.02, 0.1], way = "cancel" },
    { plan = "time", seconds = 0.05, since = "first_token" },
    { plan = "queued", delivery = "unary" },
    { plan = "prefill" },
    { plan = "last_token" },
    { plan = "never", delivery = "unary", n = 2 },
]
[engine]
runner = "simulated"
sim_fixed_ms = 5
max_num_seqs = 8
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ways")
    (folder / "mixed.toml").write_text(WORKLOAD)
    (folder / "seen.csv").write_text("who,tokens\na,3\nb,5\n")
    return measure(folder / "mixed.toml", folder / "run")


def test_every_plan_of_a_mix_is_drawn_and_nothing_fails(mixed: Run) -> None:
    rows = mixed.rows("requests")
    plans = [row["plan"] for row in rows if row["outcome"] != "cut_off"]
    kinds = ("tokens:", "share:", "time:", "first_token+", "queued", "prefill:", "last_token")
    for kind in (*kinds, "never"):
        assert any(plan.startswith(kind) for plan in plans), kind
    assert {row["outcome"] for row in rows} <= {"abandoned", "completed", "cut_off"}
    assert {row["way"] for row in rows} == {"", "fin", "rst", "half_close", "killed", "cancel"}
    asked = [entry["plan"] for entry in mixed.manifest["workload"]["load"]["mix"]]
    assert asked[4:6] == ["tokens_from_file", "answer_share"]


def test_the_engine_aborted_whom_the_client_left(mixed: Run) -> None:
    log = Log(mixed).events
    left = [row for row in mixed.rows("requests") if row["outcome"] == "abandoned"]
    assert len(left) >= 150
    came: dict[str, list[bool]] = {"time": [], "prefill": []}
    for row in left:
        kind, has_come = row["plan"].partition(":")[0], row["request_id"] in log
        if kind in came:
            came[kind].append(has_come)  # its time may be over before it is sent
        else:
            assert has_come, row
        if has_come and kind != "last_token":  # a race, which the engine may win
            assert log[row["request_id"]]["finished"]["reason"] == "abort", row
    assert all(2 * sum(one) > len(one) for one in came.values())
