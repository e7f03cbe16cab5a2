"""A case of the conformance suite: what it demands, and the function that finds out.

A case is declared where it is written, and its declaration is its documentation: the pages in
docs/conform are made from it. The function gets a bench (a server with its slots, its step and its
idle first-token time) and returns a finding: good, late, never, harm, or for information alone. It
raises `RefusedError` where the server does not offer what the case is about, and
`CannotDecideError` where nothing can be said; everything else that it raises is a crash of the
check, which cannot decide either.

To add a case:

    cases/GROUP.py                   the function, with @case(...) and `since`: the next suite, as a
                                     suite that was released never changes; a new file is named in
                                     cases/__init__.py
    tools/truth/conform_cases.py     a fault that turns it red
    tools/truth/conform_docs.py      what it needs in words, if a `Need` below is new
    make conform-docs                writes docs/conform/cases.md

The cases about a gateway are in gateway/cases.py.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal, NamedTuple

from harness.conform.bench import Bench
from harness.conform.finding import Finding
from harness.errors import ConfigError
from harness.store.conform_result import Level

# What a case may need besides a streaming route. A case that lacks it is listed as not run, or, if
# the server should offer it, as not supported.
Need = Literal[
    "pid",
    "direct",
    "drop_packets",
    "adapter",
    "resume",
    "upstream",
    "usage",
    "gauges",
    "metrics",
    "cancel_path",
    "deadline",
    "http",
]


FIRST_SUITE: Final = "2026-12"
FREED: Final = (  # of method P, unless a case says otherwise
    "the queued request's first token comes at most 4 steps later at the median of the tries, and "
    "at most 12 in each"
)


ABORT: Final = "abort a request in the scheduler as soon as its connection closes"  # a remedy


def reports(short: str) -> tuple[str, ...]:
    """The links of "owner/name#number owner/name#number". GitHub leads from an issue's link to the
    pull request of that number."""
    return tuple(f"https://github.com/{one.replace('#', '/issues/')}" for one in short.split())


Check = Callable[[Bench], Finding]


class Case(NamedTuple):
    """`methods`: the letters of docs/conform.md. `caught`: links to reports that it would have
    caught. `quick`: it runs under --quick. `remedy`: what to change in a server that fails it, to
    stand in a sentence. `since`: the first dated suite that may have it. No case is ever renamed.
    """

    id: str
    level: Level
    requirement: str
    wire: str
    passes: str
    methods: str
    check: Check
    needs: frozenset[Need]
    quick: bool
    caught: tuple[str, ...]
    why: str
    limit_s: float
    remedy: str = ""
    since: str = FIRST_SUITE

    def longest_s(self, settle_s: float, ttft_s: float) -> float:
        """The longest time of one run of its check, on a server with these times."""
        return self.limit_s + _SETTLES * settle_s + _FIRST_TOKENS * ttft_s

    @property
    def group(self) -> str:
        return self.id.partition("/")[0]

    def declaration(self) -> dict[str, object]:
        """All but the check itself."""
        declared: dict[str, object] = self._asdict()
        del declared["check"]
        return declared | {"needs": sorted(self.needs)}


NOT_GIVEN: Final = {
    "pid": "the server's process on this machine (--pid)",
    "direct": "the server behind the hop (--direct URL)",
    "drop_packets": "the right to drop packets, which only Linux gives",
    "adapter": "the name of a LoRA adapter (--adapter NAME)",
    "usage": "the place where the gateway keeps what was used (--usage ADAPTER)",
    "gauges": "the gateway's metrics page (--metrics-url)",
    "resume": 'a target that declares `disconnect = "resume"`',
}
NOT_OFFERED: Final = {
    "metrics": "no metrics page shows what this kind of server should have (--metrics-url)",
    "cancel_path": "this kind of server has no endpoint to cancel a request",
    "deadline": "this kind of server has no field that gives a request a deadline",
    "http": "the target is spoken to over gRPC only",
}


def never_checked(_bench: Bench) -> Finding:
    """The check of a case that does not run on a bench: a module of its own decides it."""
    raise AssertionError("this case has no bench")


CASES: Final[dict[str, Case]] = {}
LIMIT_S: Final = 60.0  # of a case, after which it cannot decide
_SETTLES: Final = 3  # settle times that a check waits for beyond its limit
_FIRST_TOKENS: Final = 30  # that it waits for, one after the other


def case(  # noqa: PLR0913  a declaration
    id: str,  # noqa: A002
    level: Level,
    requirement: str,
    *,
    wire: str,
    passes: str,
    methods: str,
    why: str = "",
    needs: Iterable[Need] = (),
    quick: bool = False,
    caught: Sequence[str] = (),
    limit_s: float = LIMIT_S,
    remedy: str = "",
    since: str = FIRST_SUITE,
) -> Callable[[Check], Check]:
    def declare(check: Check) -> Check:
        assert id not in CASES, id
        CASES[id] = Case(
            id=id,
            level=level,
            requirement=requirement,
            wire=wire,
            passes=passes,
            methods=methods,
            check=check,
            needs=frozenset(needs),
            quick=quick,
            caught=tuple(caught),
            why=why,
            limit_s=limit_s,
            remedy=remedy,
            since=since,
        )
        return check

    return declare


def select(cases: Iterable[Case], wanted: Sequence[str]) -> list[Case]:
    """The cases with these ids, or in these groups ("queue/"); all, if none is named.

    Raises ConfigError for an unknown id, with the nearest one.
    """
    known = list(cases)
    for word in wanted:
        if not any(is_meant(entry, word) for entry in known):
            names = [entry.id for entry in known] + [f"{entry.group}/" for entry in known]
            raise ConfigError(no_such_case(word, names))
    return [entry for entry in known if not wanted or any(is_meant(entry, word) for word in wanted)]


def no_such_case(word: str, known: Collection[str]) -> str:
    hint = "".join(f"; the nearest is {one}" for one in _nearest(word, known))
    return f"there is no case {word!r}{hint} (walkaway conform --list)"


def _nearest(word: str, known: Collection[str]) -> list[str]:
    """At most one: in the nearest group, if a group is near."""
    group, _, name = word.partition("/")
    near = get_close_matches(group, {one.partition("/")[0] for one in known}, n=1)
    if not near:
        return get_close_matches(word, known, n=1, cutoff=0.3)
    names = [one.partition("/")[2] for one in known if one.partition("/")[0] == near[0]]
    return [f"{near[0]}/{one}" for one in get_close_matches(name, names, n=1, cutoff=0.0)]


def is_meant(entry: Case, word: str) -> bool:
    """Whether the word names the case: by its id, its group, or all before a dialect."""
    wanted = word.rstrip("/")
    return word == entry.id or wanted in (entry.group, entry.id.rpartition("/")[0])


@dataclass(frozen=True, slots=True)
class Selection:
    """`cases`: to run. With reasons: `not_run`, cases that lack what they need; `missing`, cases
    that lack it and are named; `refused`, cases that the server does not offer."""

    cases: list[Case]
    not_run: dict[str, str]
    missing: dict[str, str]
    refused: dict[str, str]

    @classmethod
    def of(
        cls,
        chosen: Sequence[Case],
        wanted: Sequence[str],
        given: dict[str, bool],
        offered: dict[str, bool],
    ) -> "Selection":
        selection = cls([], {}, {}, {})
        for entry in chosen:
            lacking = [need for need in sorted(entry.needs) if given.get(need) is False]
            refused = [need for need in sorted(entry.needs) if offered.get(need) is False]
            why = f"it needs {NOT_GIVEN[lacking[0]]}" if lacking else ""
            if lacking and entry.id not in wanted:
                selection.not_run[entry.id] = why
                continue
            selection.cases.append(entry)
            if refused:
                selection.refused[entry.id] = NOT_OFFERED[refused[0]]
            elif lacking:
                selection.missing[entry.id] = why
        return selection
