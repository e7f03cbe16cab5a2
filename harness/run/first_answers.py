"""The check before the load: a few short streams show which fields of a request the server refuses,
and how many tokens an event of its answers brings.

A strict server answers 400 to a field that it does not know, and names it. That field is left out
of all further requests, which is said once. A limit of the answer that goes by another name there
gets that name, and never again one that was refused. An answer too short for the server is asked
for with more tokens. What else a server refuses is not ours to change: the refusal is handed back.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from harness.client.dialect import limit_key_of
from harness.errors import TargetError
from harness.run.refusal import LIMIT_KEYS, LONGER, hinted_field, longer_length, refused_fields
from harness.run.run_state import Preparation
from harness.run.settle import (
    Asker,
    NotServedError,
    RefusedAnswerError,
    SilentServerError,
    TextlessAnswerError,
)
from harness.workload.event_scale import Counted, come_whole
from harness.workload.target import NO_LIMIT_KEY, Target

LENGTHS: Final = (24, 13)  # tokens; of both together a fixed number an event follows
LONGEST_S: Final = 20.0
MOST_REQUESTS: Final = 14
_NEXT_LIMIT: Final = {"max_tokens": "max_completion_tokens"}  # what OpenAI's newer models take
_OTHER_REASONS: Final = (401, 403, 404, 407, 408, 429)  # than a field
_OF_THE_REQUEST: Final = (400, 422)  # what is wrong with this one is wrong with all
_OF_A_BUG: Final = (500, 501)  # of a server that fails at what it does not know
_NO_USAGE: Final = (
    "the server may not count the tokens of its answers, so that their events are counted instead"
)
_COSTS: Final = {
    "ignore_eos": "answers may end before the length asked for",
    "min_tokens": "answers may end before the length asked for",
    "include_usage": _NO_USAGE,
    "stream_options": _NO_USAGE,
    "continuous_usage_stats": "the server does not count tokens in each event, so that tokens "
    "before the end of an answer are an estimate",
}


class FirstAnswers(NamedTuple):
    """`asker`: its requests are taken by the server. `said`: what was changed for that, in
    sentences. `counted`: answers whose tokens and events are both known. `error`: of the last
    request, if none was answered."""

    asker: Asker
    said: list[str]
    counted: list[Counted]
    error: NotServedError | None = None

    @property
    def silent(self) -> SilentServerError | None:
        """The error, if the server took the request and sent nothing."""
        return self.error if isinstance(self.error, SilentServerError) else None


def check_requests(run: Preparation, asker: Asker) -> FirstAnswers:
    """Calls `fit_requests`, and sets `run.target` to what the server takes."""
    if not run.target.http or run.target.lifecycle:
        return FirstAnswers(asker, [], [])
    run.progress.phase("asking for first answers")
    found = fit_requests(asker)
    for text in found.said:
        run.notes.add(text)
        run.progress.phase(text)
    if come_whole(found.counted):
        run.notes.warn(
            "the server sends each answer in one piece: nobody can leave after some of its tokens, "
            "but only by a plan in seconds, before any token comes"
        )
    run.take_target(found.asker.target)
    return found


def check_not_refused(found: FirstAnswers) -> None:
    """Raise TargetError, with the server's words, if it refuses what every request will be."""
    error = found.error
    if isinstance(error, RefusedAnswerError) and error.status in _OF_THE_REQUEST:
        raise TargetError(
            f"the server refuses a short request (POST {found.asker.url}{found.asker.target.path}):"
            f" {error}; correct what it names: --model, or `extra_body`, `stream_options`, "
            "`limit_key` or `dialect` in the target's file (--engine)"
        )


def fit_requests(asker: Asker) -> FirstAnswers:
    """Ask until an answer comes, with what was refused left out. If none comes and the last request
    was refused too, nothing was gained by that: the asker is as it was given."""
    fitting = _Fitting(asker)
    counted: list[Counted] = []
    lengths = iter(LENGTHS)
    tokens = next(lengths)
    for _ in range(MOST_REQUESTS):
        try:
            answer = fitting.asker.answer(f"Count up to {tokens}.", tokens, longest_s=LONGEST_S)
        except NotServedError as error:
            if not fitting.mend(error, tokens):
                return _unanswered(asker, fitting, counted, error)
            continue
        if answer.counted is None:
            break
        counted.append(answer.counted)
        is_plain = answer.counted[0] == answer.counted[1]  # a token an event: no more is to learn
        if is_plain or (tokens := next(lengths, 0)) == 0:
            break
    else:
        return FirstAnswers(asker, [], [], NotServedError("no form of a request was taken"))
    return FirstAnswers(fitting.asker, fitting.said, counted)


def _unanswered(
    given: Asker, fitting: "_Fitting", counted: list[Counted], error: NotServedError
) -> FirstAnswers:
    if counted:  # the first answer shows that requests are taken
        return FirstAnswers(fitting.asker, fitting.said, counted)
    if isinstance(error, RefusedAnswerError) and error.status in (*_OF_THE_REQUEST, 200):
        return FirstAnswers(given, [], [], error)
    asker = fitting.asker
    if isinstance(error, TextlessAnswerError):  # longer answers show nothing either
        asker = replace(asker, fewest_tokens=given.fewest_tokens)
    return FirstAnswers(asker, fitting.said, [], error)


@dataclass
class _Fitting:
    """`refused`: names of the limit that the server does not take, which never come back."""

    asker: Asker
    said: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def mend(self, error: NotServedError, tokens: int) -> bool:
        """Change what the error complains of; False: nothing can be changed."""
        asked = max(tokens, self.asker.fewest_tokens)
        if isinstance(error, TextlessAnswerError):  # all of it was reasoning that is not shown
            return self._ask_longer(LONGER if asked < LONGER else None)
        if not isinstance(error, RefusedAnswerError):
            return False
        key = limit_key_of(self.asker.target)
        if key is not None and error.status not in _OTHER_REASONS:
            keys = {key, *LIMIT_KEYS}
            if self._ask_longer(longer_length(error.body, keys, asked)):
                return True
        found = without_refused(self.asker.target, error.status, error.body, self.refused)
        if found is None:
            return False
        if key is not None and limit_key_of(found[0]) != key:
            self.refused.add(key)
        self.asker = replace(self.asker, target=found[0])
        self.said.append(f"{found[1]}: {error}")
        return True

    def _ask_longer(self, tokens: int | None) -> bool:
        if tokens is None or tokens <= self.asker.fewest_tokens:
            return False
        self.asker = replace(self.asker, fewest_tokens=tokens)
        return True


def without_refused(
    target: Target, status: int, body: bytes, refused: Collection[str] = ()
) -> tuple[Target, str] | None:
    """The target without what this refusal names, and what was done; None if it names nothing that
    can be left out. `refused`: other names of the limit that were tried."""
    is_client_error = 400 <= status < 500 and status not in _OTHER_REASONS
    if not is_client_error and status not in (*_OF_A_BUG, 200):
        return None
    options = target.stream_options or {}
    named = refused_fields(body, [*target.extra_body, *options, "stream_options"])
    extra = [key for key in named if key in target.extra_body]
    has_whole = bool(options) and "stream_options" in named
    out = list(options) if has_whole else [key for key in named if key in options]
    if not extra and not out:
        return _with_other_limit(target, body, refused)
    left = {key: one for key, one in options.items() if key not in out}
    update: dict[str, Any] = {
        "extra_body": {key: one for key, one in target.extra_body.items() if key not in extra},
        "stream_options": left or None,
    }
    if "continuous_usage_stats" in out:
        update["continuous_usage"] = False
    return target.model_copy(update=update), _said_of(
        [*extra, *(["stream_options"] if has_whole else out)]
    )


def _said_of(fields: list[str]) -> str:
    *others, last = [f"`{key}`" for key in fields]
    names = f"{', '.join(others)} and {last}" if others else last
    costs = dict.fromkeys(cost for key in fields if (cost := _COSTS.get(key)) is not None)
    what = "they are" if others else "it is"
    return f"the server refuses {names}, so {what} left out{''.join(f'; {one}' for one in costs)}"


def _with_other_limit(
    target: Target, body: bytes, refused: Collection[str]
) -> tuple[Target, str] | None:
    key = limit_key_of(target)
    if key is None:
        return None
    untried = [one for one in LIMIT_KEYS if one != key and one not in refused]
    hinted = hinted_field(body, key, untried)
    if hinted is None and not refused_fields(body, [key]):
        return None
    usual = _NEXT_LIMIT.get(key, NO_LIMIT_KEY)
    other = hinted or (usual if usual in untried else NO_LIMIT_KEY)
    done = f"the length of answers is asked for by `{other}`"
    if other == NO_LIMIT_KEY:
        done = "no length of answers is asked for: the server decides when they end"
    return target.model_copy(update={"limit_key": other}), f"the server refuses `{key}`, so {done}"
