"""What a run cost and what came of it, as sums: the ground of what cancellation is worth.

Two windows. What was wasted by one cancel is counted until the server let go of it, however late.
What is a share of the server, or so much an hour, is counted within the load: after it nobody
competes for the slots, and how long that is watched would be a part of the answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from harness.analysis.cancellation import cancellations
from harness.analysis.capacity import slots_in_use_s
from harness.analysis.facts import run_facts
from harness.analysis.frames import RunFrames
from harness.analysis.step_log import num_sampled
from harness.analysis.tokens import tokens_read
from harness.records import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Sums of one run, or of several.

    `wasted_tokens`: generated for those who left - read by them, until the observation ended. All
    the others within the load, in seconds and tokens: `late_tokens` like `wasted_tokens`, and what
    those who had left held of the engine, the slots and the blocks (`*_s_for_nobody`).
    """

    load_s: float
    slot_s: float
    block_s: float
    requests: float
    left: float
    completed: float
    read_tokens: float
    generated_tokens: float
    wasted_tokens: float
    late_tokens: float
    used_slot_s: float
    engine_s_for_nobody: float
    slot_s_for_nobody: float
    block_s_for_nobody: float


def account(frames: RunFrames) -> Account | None:
    """The sums of one run; None for a server whose log does not tell them."""
    facts = run_facts(frames)
    num_blocks = _num_blocks(frames)
    tells = facts.has_lifecycle and facts.has_steps and facts.clocks_agree
    if not tells or facts.slots is None or num_blocks is None or facts.load_s <= 0:
        return None
    in_load = until(frames, facts.load_ended_ns)
    cancels, late = cancellations(frames), cancellations(in_load)
    return Account(
        load_s=facts.load_s,
        slot_s=facts.slots * facts.load_s,
        block_s=num_blocks * facts.load_s,
        requests=len(frames.requests),
        left=len(cancels),
        completed=float((frames.requests["outcome"] == Outcome.COMPLETED).sum()),
        read_tokens=float(tokens_read(frames.requests).sum()),
        generated_tokens=num_sampled(in_load.steps),
        wasted_tokens=float(cancels["wasted_tokens"].sum()),
        late_tokens=float(late["wasted_tokens"].sum()),
        used_slot_s=slots_in_use_s(frames.steps, facts),
        engine_s_for_nobody=float(late["gpu_seconds"].sum()),
        slot_s_for_nobody=float(late["slot_seconds"].sum()),
        block_s_for_nobody=float(late["block_seconds"].sum()),
    )


def until(frames: RunFrames, end_ns: int) -> RunFrames:
    """The run as if the server had been watched no longer than to this moment."""
    window = {**(frames.manifest.get("window") or {}), "settled_ns": end_ns}
    return replace(
        frames,
        manifest={**frames.manifest, "window": window},
        lifecycle=frames.lifecycle[frames.lifecycle["t_ns"] <= end_ns],
        steps=frames.steps[frames.steps["ended_ns"] <= end_ns],
    )


def sum_of(accounts: Sequence[Account | None]) -> Account | None:
    known = [one for one in accounts if one is not None]
    if not known:
        return None
    sums = {field.name: sum(getattr(one, field.name) for one in known) for field in fields(Account)}
    return Account(**sums)


def _num_blocks(frames: RunFrames) -> int | None:
    config = (frames.manifest.get("target") or {}).get("config") or {}
    found = config.get("num_blocks")
    return None if found is None else int(found)
