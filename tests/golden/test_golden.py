"""The rows of the recorded runs give the figures and verdicts that they gave at 7cb23c3.

Words may change: of texts only the number is held, all else to the last digit. What is meant to
differ stands in `changes.toml` with its reason, and must differ.
"""

import json
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import pytest

from tests.golden.outputs import EXPECTED, JUDGED, Code, judge_all, lay_out, summarise_all
from tests.golden.runs import COMPARED_ARMS, RUNS

ROOT: Final = Path(__file__).parents[2]
CHANGES: Final = tomllib.loads(Path(__file__).with_name("changes.toml").read_text())
MOST_SHOWN: Final = 60
_EMPTY: Final[tuple[Any, ...]] = (None, {}, [], "")


def differences(was: Any, now: Any, at: str) -> Iterator[tuple[str, str]]:
    """Where the two differ, and how. A field that is missing is as one that holds nothing."""
    match was, now:
        case dict(), dict():
            for key in dict.fromkeys([*was, *now]):
                yield from differences(was.get(key), now.get(key), f"{at}.{key}")
        case list(), list() if at.endswith(".agreement"):
            yield from differences(_by_method(was), _by_method(now), at)
        case list(), list() if len(was) == len(now):
            for number, (one, other) in enumerate(zip(was, now, strict=True)):
                yield from differences(one, other, f"{at}.{number}")
        case str(), str() if " " in was and " " in now:
            return
        case _ if was != now and not (was in _EMPTY and now in _EMPTY):
            yield at, f"{at}: was {_short(was)}, is {_short(now)}"


def _by_method(pairs: list[Any]) -> dict[str, Any]:
    return {f"{one['metric']} by {one['method']}": one for one in pairs}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:90]}..."


def check_same(found: Iterator[tuple[str, str]], about: str) -> None:
    """But for the named changes, each of which must have been found."""
    changes = [one["at"] for one in CHANGES.get(about, [])]
    seen = set()
    unnamed = []
    for at, text in found:
        names = [one for one in changes if fnmatchcase(at, one)]
        seen.update(names)
        if not names:
            unnamed.append(text)
    assert not unnamed, "\n".join([f"{len(unnamed)} differences:", *unnamed[:MOST_SHOWN]])
    assert seen == set(changes), f"no longer differs: {sorted(set(changes) - seen)}"


def expected_summaries() -> dict[str, Any]:
    paths = sorted(EXPECTED.glob("*/summary.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


@pytest.mark.timeout(900)
def test_the_rows_give_the_same_summaries(tmp_path: Path) -> None:
    lay_out(tmp_path, judged=False)
    was = expected_summaries()
    names = [name for name in JUDGED if name not in COMPARED_ARMS]
    now = summarise_all(Code(ROOT), tmp_path, names)
    check_same((one for run in now for one in differences(was[run], now[run], run)), "summaries")


@pytest.mark.timeout(900)
def test_folders_of_then_are_judged_compared_and_exported_as_then(tmp_path: Path) -> None:
    lay_out(tmp_path, judged=True)
    now = dict(judge_all(Code(ROOT), tmp_path))
    was = {name: (EXPECTED / name).read_text() for name in now}
    found = (
        one
        for name in was
        for one in differences(json.loads(was[name]), json.loads(now[name]), name)
    )
    check_same(found, "commands")


def test_each_class_of_behaviour_is_there() -> None:
    kinds = {
        name: set(one["metrics"]) for name, one in expected_summaries().items() if "metrics" in one
    }
    measured = set().union(*kinds.values())
    assert len(measured) > 45
    assert set(RUNS) <= {path.name for path in EXPECTED.iterdir()}
