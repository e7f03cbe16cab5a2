"""What a check of the suite found."""

from typing import NamedTuple

from harness.store.conform_result import Failure, JudgingWay, Steps

Evidence = dict[str, float | str | None]  # the names hold the units


class Finding(NamedTuple):
    """`failure` None: good, or, if not `is_judged`, for information alone. `stops`, `steps`, `way`:
    see CaseResult. `is_one_try`: a red by a single try, which may be chance."""

    failure: Failure | None
    reason: str
    evidence: Evidence
    is_judged: bool = True
    stops: bool | None = None
    steps: Steps | None = None
    way: JudgingWay | None = None
    is_one_try: bool = False


def found(good: str, wrong: str | None, evidence: Evidence, how: Failure) -> Finding:
    """`wrong`: what is wrong, if anything is; `how` is then the failure."""
    return Finding(None, good, evidence) if wrong is None else Finding(how, wrong, evidence)
