"""Every way to leave, against the bundled engine: what the ENGINE saw of it.

The client is the load's own. The engine waits less long for a client that is silent (0.5 s) or
reads nothing (2 s) than it would by default (10 s), and holds less for it.
"""

from collections.abc import Iterator

import pytest

from harness.records import Outcome, Way, WireClose
from tests.e2e.running import Log, Run, measure
from tests.harness.client.asking import Client, after
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
MAX_TOKENS = 3000


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    with running(*FLAGS) as engine:
        yield engine


@pytest.fixture
def user(engine: RunningEngine) -> Iterator[Client]:
    user = Client(engine.url, model="tiny")
    yield user
    user.client.close()  # a socket that fell silent would be closed before the engine notices


def cancelled(engine: RunningEngine, *, method: str) -> float:
    try:
        return engine.metric(CANCELLATIONS, method=method)
    except AssertionError:
        return 0


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
    engine: RunningEngine, user: Client, way: Way, wire_close: WireClose, method: str
) -> None:
    before = cancelled(engine, method=method)
    row = user.ask(
        after(5, think_ns=STEP_NS // 2),
        way,
        request_id=f"leaver-{way}",
        max_tokens=MAX_TOKENS,
        planned_abandon=5,
    )
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
