"""A case of a gateway before the bundled upstream: declared once, and run in each dialect."""

from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from harness.conform.case import LIMIT_S, Case, Need, never_checked, reports
from harness.conform.finding import Finding
from harness.conform.gateway.bench import GatewayBench
from harness.conform.gateway.crossing import JudgedCrossing
from harness.run.recipes import PATHS
from harness.store.conform_result import Level
from harness.workload.target import DialectName

DIALECTS: Final = tuple(PATHS)
BRIEF_TOKENS: Final = 50  # of an answer that is left where nothing else waits for its end
REMEDY: Final = "close the connection to the provider as soon as the client's closes"
BOUND: Final = (
    "the gateway closes its connection to the upstream at most 4 steps after the leave, of 100 ms, "
    "at the median of the tries, and at most 12 in each"
)
Check = Callable[[GatewayBench, DialectName], JudgedCrossing | Finding]
Stage = Literal["first", "leaves", "one by one", "after all", "last"]


class GatewayCase(NamedTuple):
    """`stage`: when the case runs. "leaves": together with the others of its dialect; "last": the
    provider seems to fail in it, and the gateway may then shut the provider out."""

    case: Case
    dialect: DialectName
    stage: Stage
    check: Check


GATEWAY_CASES: Final[dict[str, GatewayCase]] = {}


def crossing(  # noqa: PLR0913  a declaration
    name: str,
    level: Level,
    requirement: str,
    *,
    wire: str,
    passes: str,
    why: str,
    remedy: str = REMEDY,
    stage: Stage = "leaves",
    caught: str = "",
    quick: bool = False,
    limit_s: float = LIMIT_S,
    needs: Need = "upstream",
) -> Callable[[Check], Check]:
    """Declares the case in each dialect."""

    def declare(check: Check) -> Check:
        for dialect in DIALECTS:
            case = Case(
                id=f"{name}/{dialect}",
                level=level,
                requirement=requirement,
                wire=wire,
                passes=passes,
                methods="U",
                check=never_checked,
                needs=frozenset[Need]({"upstream", needs}),
                quick=quick,
                caught=reports(caught),
                why=why,
                limit_s=limit_s,
                remedy=remedy,
            )
            GATEWAY_CASES[case.id] = GatewayCase(case, dialect, stage, check)
        return check

    return declare
