"""The last line of a run: what passed, what failed, and what to change in the server."""

from collections.abc import Mapping, Sequence
from typing import Final

from harness.conform.verdict import UNDECIDED, is_unexpected_failure
from harness.store.conform_result import CaseResult, Verdict

_MOST_NAMED: Final = 4  # cases behind a remedy


def sentence(
    results: Sequence[CaseResult], not_run: Mapping[str, str], *, strict: bool = False
) -> str:
    """One sentence. A failure that was expected, or that is not judged, asks for no change."""
    judged = [one for one in results if one.verdict not in (Verdict.NOT_SUPPORTED, Verdict.INFO)]
    if not judged:
        return "No case was decided."
    failed = [one for one in judged if is_unexpected_failure(one, strict=strict)]
    listed = sum(one.verdict is Verdict.FAIL and one.expected == "listed" for one in judged)
    minor = sum(one.verdict is Verdict.FAIL for one in judged) - len(failed) - listed
    passed = sum(one.verdict is Verdict.PASS for one in judged)
    undecided = sum(one.verdict in UNDECIDED for one in judged)
    others = [
        (listed, "failed as expected"),
        (minor, "failed without being judged (--strict judges them)"),
        (undecided, "could not be decided"),
        (len(failed), "failed"),
    ]
    parts = [f"{passed} of {len(judged)} cases passed"]
    parts += [f"{count} {words}" for count, words in others if count]
    said = _listed(parts)
    if not_run and not failed:
        said += f" ({len(not_run)} not run)"
    remedies = _listed([*_remedies(failed)], between="; ", last="; and ")
    server = "gateway" if any(one.dialect for one in judged) else "server"
    return f"{said}: to mend the {server}, {remedies}." if remedies else f"{said}."


def _remedies(failed: Sequence[CaseResult]) -> list[str]:
    """Each remedy once, with the cases that ask for it, the most wanted first."""
    cases: dict[str, dict[str, None]] = {}
    for one in failed:
        if one.remedy:
            cases.setdefault(one.remedy, {})[_without_dialect(one)] = None
    by_need = sorted(cases.items(), key=lambda one: -len(one[1]))
    return [f"{remedy} ({_named([*ids])})" for remedy, ids in by_need]


def _without_dialect(one: CaseResult) -> str:
    return one.id if one.dialect is None else one.id.rpartition("/")[0]


def _named(ids: Sequence[str]) -> str:
    more = len(ids) - _MOST_NAMED
    return ", ".join(ids[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _listed(parts: Sequence[str], *, between: str = ", ", last: str = " and ") -> str:
    if len(parts) < 2:
        return "".join(parts)
    return f"{between.join(parts[:-1])}{last}{parts[-1]}"
