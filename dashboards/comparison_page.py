"""From the folders of a baseline and its candidates to one HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dashboards.compared import Answer, answers, details, runs_table, side_by_side
from dashboards.comparison_sections import sections
from dashboards.contenders import Contest, Match, read_contest
from dashboards.page import document, save
from dashboards.section import Section
from dashboards.tables import PlainTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What the page says of one arm, or of runs without arms."""

    anchor: str
    arm: str
    answers: Sequence[Answer]
    tables: Sequence[PlainTable]
    details: Sequence[PlainTable]
    sections: Sequence[Section]


def write_comparison(baseline: Path, candidates: Sequence[Path], output: Path) -> None:
    """Raises `ConfigError` where nothing can be compared, or the page cannot be written."""
    contest = read_contest(baseline, candidates)
    rounds = [_round(match, number) for number, match in enumerate(contest.matches)]
    html = document(
        "comparison.html.j2",
        {one.anchor: one.sections for one in rounds},
        title=_title(contest),
        question=str(contest.baseline.manifest.workload.get("question") or ""),
        workload=str(contest.baseline.summary.get("workload")),
        refused=contest.refused,
        rounds=rounds,
        runs=runs_table(contest),
    )
    save(html, output)


def _round(match: Match, number: int) -> Round:
    return Round(
        anchor=f"arm{number}",
        arm=match.arm,
        answers=answers(match),
        tables=[side_by_side(match)],
        details=[details(candidate, comparison) for candidate, comparison in match.candidates],
        sections=sections(match),
    )


def _title(contest: Contest) -> str:
    match = contest.matches[0]
    labels = dict.fromkeys(one.label for of in contest.matches for one, _ in of.candidates)
    who = next(iter(labels)) if len(labels) == 1 else f"{len(labels)} candidates"
    return f"{who} against {match.baseline.label}"
