"""The bundled engine as a server that is wrong in eight ways, for `walkaway conform --against bad`.

The ways do not hide each other: each is found by a case that would pass without it.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from harness.store.conform_result import CaseResult, Verdict


class Wrong(NamedTuple):
    """`fault`: as `walkaway engine --fault` takes it. `case`: the one that finds it."""

    fault: str
    case: str
    words: str


WAYS: Final = (
    Wrong("ignore-disconnect-unary", "unary/leave", "an answer in one piece is never stopped"),
    Wrong(
        "queued-abort-ends-running", "queue/bystander", "a leave in the queue ends another's stream"
    ),
    Wrong("abort-parent-only", "n/parent", "of n answers only the first is stopped"),
    Wrong("double-count", "count/aborts", "each leave is counted twice"),
    Wrong("cancel-does-nothing", "api/cancel", "the cancel endpoint says 200 and does nothing"),
    Wrong("forget-aborted-tokens", "count/tokens", "tokens of answers that were left do not count"),
    Wrong("label-length", "count/label", "a leave is counted as a whole answer"),
    Wrong(
        "abort-after-done",
        "done/read-to-eof",
        "a client that closes after the end is counted as a leave",
    ),
)


def table(results: Sequence[CaseResult]) -> list[str]:
    """A line for each way: whether its case found it."""
    verdicts: Mapping[str, Verdict] = {one.id: one.verdict for one in results}
    width = max(len(way.words) for way in WAYS)
    found = sum(verdicts.get(way.case) is Verdict.FAIL for way in WAYS)
    lines = [f"  {way.words:{width}}  {_how_found(way.case, verdicts)}" for way in WAYS]
    return [f"\nThis server is wrong in {len(WAYS)} ways; {found} were found:", *lines]


def _how_found(case: str, verdicts: Mapping[str, Verdict]) -> str:
    if case not in verdicts:
        return f"not looked for: {case} was not run"
    return f"found by {case}" if verdicts[case] is Verdict.FAIL else f"NOT FOUND by {case}"
