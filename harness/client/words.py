"""What the words of servers mean: names, codes, reasons and sentences, without any JSON."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from harness.client.chunk import MAX_CHARS

# Names are compared by their letters alone: `keep-alive`, `[HEARTBEAT] 12`.
_HEARTBEATS: Final = frozenset(
    {"ping", "pong", "heartbeat", "keepalive", "noop", "comment", "ok", "alive", "stillalive"}
    | {"beat", "hb", "keep"}
)
# One of these words in place of an error says that there is none.
_WELL: Final = frozenset(
    {"ok", "okay", "success", "succeeded", "successful", "normal", "none", "null", "nil"}
    | {"no_error", "noerror", "false", "n/a", "healthy", "成功", "操作成功", "无"}
)
_PROGRESS: Final = frozenset(
    {"ready", "done", "complete", "completed", "finished", "queued", "pending", "processing"}
    | {"running", "waiting", "loading", "started", "accepted", "in_progress", "in progress"}
    | {"start", "begin", "connected", "connecting", "open", "undefined", "working", "thinking"}
)
_FAILURES: Final = frozenset(
    {"error", "errors", "err", "exception", "exceptions", "failure", "failures", "failed", "fail"}
    | {"fatal", "fault", "abort", "aborted", "timeout", "timedout", "crash", "crashed", "panic"}
    | {"traceback", "overloaded", "unavailable", "killed", "interrupted", "insufficient", "died"}
    | {"errored"}
)
_FAILED_NAMES: Final = frozenset(  # no finish reasons
    {"exceeded", "rejected", "denied", "exhausted", "throttled", "refused"}
)
_FAILED_REASONS: Final = frozenset(
    {"dead", "deadline", "evicted", "memory", "oom", "preempted", "rate", "throttled"}
    | {"overload", "busy", "quota", "exhausted", "timeouts"}
)
# Alone, or next to what broke: `upstream_closed`, but not `tag_closed`.
_BROKEN: Final = frozenset(
    {"reset", "lost", "expired", "shutdown", "closed", "internal", "gateway"}
)
_BREAKABLE: Final = frozenset(
    {"upstream", "connection", "conn", "socket", "peer", "stream", "worker", "server", "service"}
    | {"backend", "engine", "replica", "node", "session", "bad"}
)
# An event with one of these words in its name is not about the answer: a log, a tool, a retry.
_ASIDE: Final = frozenset(
    {"log", "logs", "info", "debug", "trace", "warn", "warning", "warnings", "notice", "tool"}
    | {"tools", "retry", "retries", "retrying", "metric", "metrics", "stats", "telemetry"}
)
_FIGURES: Final = frozenset({"rate", "count", "total", "budget"})
_LONGEST_STATE: Final = 3  # words
_ABORTS: Final = frozenset(
    {"abort", "aborted", "cancel", "cancelled", "canceled", "disconnect", "disconnected"}
)
_ERROR_KEYS: Final = frozenset(
    {"error", "errors", "err", "exception", "exceptions", "fault", "failure", "failures", "fatal"}
    | {"errno", "errcode", "errmsg", "traceback"}
)
_OF_AN_ERROR: Final = frozenset(
    {"message", "msg", "code", "type", "description", "detail", "details", "reason", "text"}
    | {"string", "info", "no", "number", "status", "name", "body", "response", "data", "title"}
)
_AROUND_A_WORD: Final = " \t\"'[]<>.!:*-"
_LETTERS: Final = re.compile(r"[^\W\d_]{2,}")  # a time has single ones
# A time, or nothing that can be seen.
_OF_A_CLOCK: Final = re.compile(r"[\s\dTZ:.+-]{8,}|[\s\x00\u200b\ufeff]*").fullmatch
_LONGEST_NAME: Final = 100
_NEGATIONS: Final = frozenset({"no", "non", "not", "without", "zero", "none"})
_EARLIER: Final = frozenset({"on", "after", "previous"})  # `on_error`, `retry_after_error`
_GOES_WELL: Final = frozenset({"free", "open", "over"})  # `error-free`, `fail-open`
_NAME_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

_NO_ERROR: Final = re.compile(
    r"\b(?:no|without|0|zero) (?:errors?|exceptions?|failures?)\b"
    r"(?: (?:occurred|found|detected|reported)\b)?|(?:没有|无)(?:错误|异常|失败)",
    re.IGNORECASE,
)
_ERROR_NUMBER: Final = re.compile(r"e(?:rr)?[-_]?\d+", re.IGNORECASE).fullmatch
_ERROR_TEXT: Final = re.compile(
    r"""
      \b\w*(?:error|exception)s?\b | \b(?:traceback|fatal|panic(?:ked)?|errno|fault|oom|err|eof)\b
    | \b(?:fail(?:ed|ure|ures|s)?|abort(?:ed|ing)?|crash(?:ed|es)?|died|dead|killed|terminated)\b
    | \b(?:unavailable|overloaded|unreachable|refused|rejected|denied|forbidden|unauthori[sz]ed)\b
    | \b(?:tim(?:ed?|ing)[ -]?out|exhausted|exceed(?:ed|s)|insufficient|quota|throttl\w+|expired)\b
    | \b(?:cancell?ed|disconnected|invalid|unsupported|unable|cannot|lost|gone)\b
    | \b(?:bad[ ]gateway|bad[ ]request|not[ ]found|too[ ]many|rate[ ]limit\w*|shutting[ ]down)\b
    | \b(?:reset[ ]by|broken[ ]pipe|out[ ]of|no[ ]healthy|could[ ]not|over[ ]capacity)\b
    | \b(?:went[ ]wrong|context[ ](?:length|window))\b | 错误|失败|异常|超时|崩溃
    | ^\W*(?:http/\d\S*\s+)?[45]\d\d\b | ^\s*internal\s*$
    | ^\s*<(?:!doctype|html|head|body|title|h1|\?xml)\b
    """,
    re.IGNORECASE | re.VERBOSE,
)
# Words of a server that refuses, or that is still at it: they fail an answer only if it then ends.
_DOUBTFUL: Final = re.compile(
    r"\b(?:busy|interrupted|(?:try|retry)[ ](?:again|later))\b|繁忙|稍后", re.IGNORECASE
)
# A key that says an error, and its value, in JSON that is broken or is Python's.
_ERROR_FIELD: Final = re.compile(
    r"""['"](?:error|errors|exception|fault|failure)['"]\s*:\s*(?!null|none|false|0|["'\[{]\s*["'\]}])""",
    re.IGNORECASE,
)
_ANSWER_FIELD: Final = re.compile(r"""['"](?:choices|delta|content|text)['"]\s*:""")
_WORDS_FIELD: Final = re.compile(
    r"""['"](?:message|msg|detail|error)['"]\s*:\s*(?:"((?:[^"\\]|\\.)+)"|'((?:[^'\\]|\\.)+)')""",
    re.IGNORECASE,
)
_TITLE: Final = re.compile(r"<(title|h1)\b[^>]*>\s*([^<]+?)\s*</\1>", re.IGNORECASE)

# Not only null: what servers write where there is no reason yet.
_NO_END: Final = frozenset(
    {"", "null", "none", "nil", "undefined", "unspecified", "unknown", "n/a", "na", "nan", "false"}
    | {"0", "-", "unset", "not_set", "not_finished", "not_stopped", "not_done", "unfinished", "no"}
    | {"in_progress", "inprogress", "progress", "running", "generating", "pending", "streaming"}
    | {"stream", "continue", "continues", "continuing", "ongoing", "processing", "partial", "more"}
    | {"queued", "waiting", "started", "start", "active", "open", "not_applicable", "delta"}
    | {"chunk", "working", "thinking", "wait", "n.a.", "tbd", "init", "loading", "..."}
)
_END_NAMES: Final = frozenset(
    {"done", "end", "ended", "complete", "completed", "finish", "finished", "eos", "stream_end"}
    | {"message_stop"}
    | {"stream_complete", "stream_done", "message_end", "end_of_stream", "final"}
)


def clean(text: str) -> str:
    """Fit for a file: half a pair of surrogates is replaced."""
    return text.encode("utf-8", "replace").decode()


def cut(text: str) -> str:
    """The text, cut to what a row keeps of a server's own words."""
    return clean(text.strip())[:MAX_CHARS]


@lru_cache(maxsize=512)
def _words(name: str) -> tuple[str, ...]:
    return tuple(word.lower() for word in _NAME_WORDS.findall(name))


def short(decide: Callable[[str], bool]) -> Callable[[str], bool]:
    """Decided once for each name; a name without end is none, and is not kept."""
    known = lru_cache(maxsize=512)(decide)
    return lambda name: len(name) <= _LONGEST_NAME and known(name)


@short
def names_aside(name: str) -> bool:
    """The name, the type or the state of an event that fails no answer, whatever it says."""
    words = _words(name)
    return not _ASIDE.isdisjoint(words) or (bool(words) and words[-1] in _FIGURES)


def _fail(words: tuple[str, ...]) -> bool:
    is_timed_out = "timed" in words and "out" in words
    is_named = is_timed_out or not _FAILURES.isdisjoint(words)
    return is_named and _NEGATIONS.isdisjoint(words) and words[-1] not in _GOES_WELL


def _abort(words: tuple[str, ...]) -> bool:
    return not _ABORTS.isdisjoint(words) and _NEGATIONS.isdisjoint(words)


def _is_state(words: tuple[str, ...]) -> bool:
    """Whether they name a state, not a sentence about one."""
    return len(words) <= _LONGEST_STATE


@short
def names_failed_state(state: str) -> bool:
    """`failed`, `timed_out`. A response that was cancelled has a reason of its own to say."""
    words = _words(state)
    return _is_state(words) and _fail(words)


@short
def is_failing_state(state: str) -> bool:
    """An event that says why may also name `rejected`, `cancelled` or `RESOURCE_EXHAUSTED`."""
    return _is_state(_words(state)) and is_failing_word(state)


@short
def names_failure(name: str) -> bool:
    """The name of an event, or its type: `error`, `overloaded_error`, `response.failed`. An event
    of Responses with a longer name is about one item: a tool that fails fails no answer."""
    words = _words(name)
    if name.startswith("response."):
        return name.count(".") == 1 and _fail(words)
    is_named = not _FAILED_NAMES.isdisjoint(words) and _NEGATIONS.isdisjoint(words)
    return not names_aside(name) and (is_named or _abort(words) or _fail(words))


@lru_cache(maxsize=256)
def is_error_name(name: bytes) -> bool:
    """Whether an event of this name is an error."""
    return names_failure(name.decode("latin-1"))


@short
def is_error_key(key: str) -> bool:
    """`error`, `last_error`, `errorMessage`; not `error_rate`, nor `no_error`."""
    words = _words(key)
    if not words or words[0] in _NEGATIONS or not _EARLIER.isdisjoint(words):
        return False
    return words[-1] in _ERROR_KEYS or (words[0] in _ERROR_KEYS and words[-1] in _OF_AN_ERROR)


def is_well(text: str) -> bool:
    plain = text.strip().strip(".!").lower()
    return not plain.strip("0") or plain in _WELL or _NO_ERROR.fullmatch(plain) is not None


def is_progress(text: str) -> bool:
    """Words that say that all goes as it should."""
    return is_well(text) or is_heartbeat(text) or text.strip().strip(".!").lower() in _PROGRESS


def _spaced(code: str) -> str:
    return " ".join(_words(code[:_LONGEST_NAME]))


def is_failing_word(code: str) -> bool:
    """A code or a status in words: `internal_error`, `InvalidParameter`, `failed`, `E5001`."""
    if is_progress(code) or not _NEGATIONS.isdisjoint(_words(code[:_LONGEST_NAME])):
        return False
    is_number = _ERROR_NUMBER(code.strip()) is not None
    return is_number or names_failure(code) or is_error_text(_spaced(code))


def is_error_text(text: str) -> bool:
    """Plain text where an event was due: a status line, a web page, a traceback, or a sentence with
    a word for a failure. Broken JSON is judged by its keys, since its texts may be the answer's."""
    if text.lstrip().startswith(("{", "[{")):
        return _ERROR_FIELD.search(text) is not None and _ANSWER_FIELD.search(text) is None
    return _ERROR_TEXT.search(_NO_ERROR.sub("", text[:10_000])) is not None


def is_doubtful_text(text: str) -> bool:
    """It may be why an answer ends: "server is busy, please try again later"."""
    return is_error_text(text) or _DOUBTFUL.search(text[:10_000]) is not None


def words_of_text(text: str) -> str:
    """The title of a web page, the message of broken JSON, else the text itself."""
    start = text.lstrip()[:10_000]
    if start.startswith("<") and (title := _TITLE.search(start)) is not None:
        return cut(title[2])
    if start.startswith(("{", "[{")) and (found := _WORDS_FIELD.search(start)) is not None:
        return cut(found[1] or found[2])
    return cut(text)


def is_heartbeat(text: str) -> bool:
    """An event's name, or its data where that is no JSON: `ping`, `: PING`, `[heartbeat] 12`."""
    start = text[: 2 * _LONGEST_NAME].lower()
    return text.strip() == "." or "".join(_LETTERS.findall(start)) in _HEARTBEATS


def says_nothing(text: str) -> bool:
    """Data that is no JSON: a heartbeat, a time, invisible characters, or a word that the
    answer is to come: `[PROCESSING]`, `waiting...`."""
    core = text.strip(_AROUND_A_WORD)
    is_word = bool(core) and is_progress(core) and not is_end_name(core)
    return is_word or _OF_A_CLOCK(text) is not None


def is_done_text(text: str) -> bool:
    word = text.strip().removeprefix("data:")
    return word.strip(" \t\r\n\"'[]<>!").upper() == "DONE"


def is_end_name(name: str) -> bool:
    """The name of an event, or its type."""
    return name.strip().lower().replace("-", "_") in _END_NAMES


def end_of(reason: object) -> str | None:
    """Why an answer has ended; None if it has not. SGLang's own form is {"type": "length"}."""
    if isinstance(reason, dict):
        reason = reason.get("type") or reason.get("reason")
    if isinstance(reason, list) and len(reason) == 1:
        reason = reason[0]
    if not isinstance(reason, str):
        return None
    kind = re.sub(r"[\s-]+", "_", reason.strip().lower()).removeprefix("finish_reason_")
    is_none = kind in _NO_END or kind.endswith(("_unspecified", "_unknown"))
    return None if is_none or reason.strip() == "-" else clean(reason.strip())[:MAX_CHARS]


@short
def is_abort(reason: str) -> bool:
    """A finish reason: the server ended the request unasked."""
    return _abort(_words(reason))


@short
def is_failure(reason: str) -> bool:
    """A finish reason that is none of an answer: `error`, `timeout`, `network_error`."""
    words = _words(reason)
    return _fail(words) or not _FAILED_REASONS.isdisjoint(words) or _broke(words)


def _broke(words: tuple[str, ...]) -> bool:
    is_named = len(words) == 1 or not _BREAKABLE.isdisjoint(words)
    return is_named and not _BROKEN.isdisjoint(words) and _NEGATIONS.isdisjoint(words)
