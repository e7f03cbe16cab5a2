"""Traffic that nobody sent, in the three shapes that traces come in: from a seed, as text.

.venv/bin/python -m tests.harness.workload.made_up_traces > workloads/made_up_trace.jsonl
"""

import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final

from harness.workload.traces import PAGE_TOKENS, Recorded

_BEGIN: Final = datetime(2025, 1, 1, tzinfo=UTC)
_SHIPPED: Final = (60, 1)  # requests of the trace that ships, and its seed


def conversations(number: int, *, seed: int) -> list[Recorded]:
    """One request a second on average. All begin with the same page; a request continues an earlier
    conversation (its pages, and one to three more) or begins one."""
    rng = random.Random(seed)
    known: list[tuple[int, ...]] = [(0,)]
    requests: list[Recorded] = []
    at_ms = next_page = 0
    for _ in range(number):
        before = rng.choice(known)
        new = range(next_page + 1, next_page + 1 + rng.randint(1, 3))
        next_page = new[-1]
        pages = (*before, *new)
        known.append(pages)
        requests.append(
            Recorded(
                at_s=at_ms / 1e3,
                prompt_tokens=(len(pages) - 1) * PAGE_TOKENS + rng.randint(1, PAGE_TOKENS),
                answer_tokens=min(900, 1 + int(rng.lognormvariate(4.5, 1))),
                pages=pages,
            )
        )
        at_ms += int(1000 * rng.expovariate(1))
    return requests


def as_mooncake(requests: list[Recorded]) -> Iterator[str]:
    for one in requests:
        line = {
            "timestamp": round(one.at_s * 1e3),
            "input_length": one.prompt_tokens,
            "output_length": one.answer_tokens,
            "hash_ids": one.pages,
        }
        yield json.dumps(line) + "\n"


def as_azure(requests: list[Recorded]) -> Iterator[str]:
    yield "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    for one in requests:
        when = (_BEGIN + timedelta(seconds=one.at_s)).replace(tzinfo=None)
        stamp = when.isoformat(sep=" ", timespec="microseconds")
        yield f"{stamp}0,{one.prompt_tokens},{one.answer_tokens}\r\n"


def as_burst_gpt(requests: list[Recorded]) -> Iterator[str]:
    yield "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    for one in requests:
        total = one.prompt_tokens + one.answer_tokens
        yield (
            f"{one.at_s},ChatGPT,{one.prompt_tokens},{one.answer_tokens},{total},Conversation log\n"
        )


if __name__ == "__main__":
    number, seed = _SHIPPED
    sys.stdout.writelines(as_mooncake(conversations(number, seed=seed)))
