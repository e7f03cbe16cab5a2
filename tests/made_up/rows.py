"""The rows and the manifest of a run that never was; what a test does not name is as in any run."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from harness.records import (
    LifecycleEvent,
    Outcome,
    RequestRow,
    Role,
    StepRow,
    TokenCounting,
)
from harness.store.manifest import ClockCheck, Manifest, TargetFacts, Window

ORIGIN_NS = 5_000_000_000_000


def at(ms: float) -> int:
    """Milliseconds after an arbitrary origin."""
    return ORIGIN_NS + round(ms * 1e6)


def request_row(
    name: str, *, sent_ns: int, ended_ns: int, outcome: Outcome, **more: Any
) -> RequestRow:
    """A request with a token at each of `token_times_ns`; an abandoned one was left at its end."""
    times = more.get("token_times_ns", [])
    row = RequestRow(
        request_id=name,
        arm="main",
        role=Role.USER,
        trial=None,
        user=0,
        stream=True,
        planned_abandon=None,
        think_ns=None,
        max_tokens=100_000,
        intended_start_ns=sent_ns,
        sent_ns=sent_ns,
        first_token_ns=times[0] if times else None,
        last_token_ns=times[-1] if times else None,
        abandoned_ns=ended_ns if outcome is Outcome.ABANDONED else None,
        ended_ns=ended_ns,
        tokens_read=len(times),
        event_tokens=[1] * len(times),
        token_counting=TokenCounting.USAGE,
        outcome=outcome,
    )
    return msgspec.structs.replace(row, **more)


def lifecycle_event(seq: int, t_ns: int, event: str, name: str, **more: Any) -> LifecycleEvent:
    """An event of the client's request `name`, to which the server gave the id "cmpl-" + name."""
    row = LifecycleEvent(
        seq=seq,
        t_ns=t_ns,
        event=event,
        request_id=f"cmpl-{name}",
        client_request_id=name,
        step=None,
        num_generated=0,
        num_blocks=0,
        reason=None,
    )
    return msgspec.structs.replace(row, **more)


def step_row(
    number: int,
    started_ns: int,
    ended_ns: int,
    scheduled: Mapping[str, int],
    sampled: Iterable[str] = (),
    **more: Any,
) -> StepRow:
    """A step that computed `scheduled` tokens by request, and sampled one of each in `sampled`."""
    row = StepRow(
        step=number,
        started_ns=started_ns,
        ended_ns=ended_ns,
        num_running=len(scheduled),
        num_waiting=0,
        free_blocks=0,
        scheduled={f"cmpl-{name}": n for name, n in scheduled.items()},
        sampled={f"cmpl-{name}": 1 for name in sampled},
    )
    return msgspec.structs.replace(row, **more)


def made_up_manifest(**more: Any) -> Manifest:
    """A complete run against the bundled engine, which it started itself: a second of load."""
    manifest = Manifest(
        run_id="made-up",
        status="complete",
        created_at="2026-01-01T00:00:00+00:00",
        command=["walkaway"],
        seed=1,
        versions={},
        hardware={},
        workload={"name": "hand-made"},
        target=target_facts(),
        clock=ClockCheck(comparable=True),
        window=Window(load_started_ns=at(0), load_ended_ns=at(1000), settled_ns=at(4000)),
        settle_s=2.0,
        scrape_interval_s=0.05,
    )
    return msgspec.structs.replace(manifest, **more)


def target_facts(**more: Any) -> TargetFacts:
    facts = TargetFacts(
        engine="reference",
        url="http://127.0.0.1:1",
        metrics_urls=[],
        model="tiny",
        started_by_us=True,
        spec={"metrics": {}},
        config={"max_num_seqs": 2, "block_size": 4},
    )
    return msgspec.structs.replace(facts, **more)
