"""The result of a run as a badge: shields.io reads such a file from an address (its "endpoint")."""

import json
from typing import Final

from harness.conform.verdict import UNDECIDED
from harness.store.conform_result import ConformResult, Verdict

BADGE_MARK: Final = b'"label": "walkaway conform'  # in the head of each such file
_COLORS: Final = {0: "brightgreen", 3: "red", 4: "yellow"}  # by exit code


def as_badge(result: ConformResult) -> bytes:
    suite = f" {result.suite}" if result.suite else ""
    badge = {
        "schemaVersion": 1,
        "label": f"walkaway conform{suite}",
        "message": _message(result),
        "color": _COLORS.get(result.exit_code, "lightgrey"),
    }
    return json.dumps(badge, indent=2).encode() + b"\n"


def _message(result: ConformResult) -> str:
    verdicts = [one.verdict for one in result.cases]
    decided = verdicts.count(Verdict.PASS) + verdicts.count(Verdict.FAIL)
    undecided = sum(one in UNDECIDED for one in verdicts)
    told = f"{verdicts.count(Verdict.PASS)} of {decided} pass"
    return f"{told}, {undecided} undecided" if undecided else told
