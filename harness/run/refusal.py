"""What a server refuses, read from its words: fields that it does not know or support, a name that
it wants instead, a length of an answer that is too short for it.

A field is refused only if a sentence that names it says that the field is not known or not
supported, or if an error whose place is the field says so. A field that is in a list of what the
server does know, in an echo of the request, or in a complaint about its value is not refused.
"""

import ast
import json
import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from harness.client.chunk import NONSENSE

LIMIT_KEYS: Final = ("max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_tokens")
LONGER: Final = 512  # tokens: of an answer that a server calls too short, without a number
_LONGEST: Final = 65_536  # tokens; a number above is no length of an answer
_MOST_BYTES: Final = 1 << 16  # of a refusal
_MOST_CHARS: Final = 4000  # of one text in it
_DEEPEST: Final = 12
_MOST_DETAILS: Final = 200  # objects of one refusal

_FIELD: Final = r"(?:field|param(?:eter)?|argument|key|property|attribute|option|input|name)"
_UNKNOWN: Final = re.compile(
    rf"""\bunknown | \bunrecogni[sz]ed | \bunsupported | \bun(?:permitted|expected)
    | \bextra(?:neous)?[ _](?:inputs?|fields?|keys?|propert(?:y|ies)|param\w*|arg\w*|forbidden)
    | \badditional[ _]?(?:propert(?:y|ies)|fields?|keys?|param\w*|arg\w*) | \bexcess\b
    | \b(?:disallowed|illegal|forbidden|disabled|undeclared|superfluous)\b
    | \bnot[ ]enabled | \bnot[ ]exist\b | \bkey[ ]not[ ]in\b | \bonly[ ]available\b
    | \bnot[ ](?:\w+[ ])?(?:supported|permitted|allowed|accepted|recogni[sz]ed|known|available
        |implemented|expected|understood)
    | \b(?:does|do|did)(?:[ ]not|n't)[ ](?:support|allow|accept|recogni[sz]e|know|understand)
    | \b(?:isn't|aren't|can(?:not|'t)[ ]be|no[ ]longer)[ ](?:supported|permitted|allowed|used|set
        |specified|accepted)
    | \bnot[ ](?:found[ ])?in[ ](?:the[ ])?schema
    | \bshould[ ]not[ ]exist | \bcould[ ]not[ ]be[ ]mapped
    | \b(?:not[ ]a|no|no[ ]such|cannot[ ]find|could[ ]not[ ]find)[ ]
        (?:(?:valid|known|supported|recogni[sz]ed)[ ])?(?:{_FIELD}|member)\b
    | \binvalid[ ](?:\w+[ ])?{_FIELD}s?\b | \bdeprecated | \bremoved\b""",
    re.IGNORECASE | re.VERBOSE,
)
# A complaint about what was given, by a server that knows the field.
_OF_A_VALUE: Final = re.compile(
    r"""\b(?:unsupported|invalid|unexpected|unknown)[_ ](?:value|type|format|token|character|end)
    | \bvalid[ ]json\b
    | \b(?:must|should|has[ ]to|needs[ ]to)[ ]be\b | \bbetween\b | \brange\b
    | \bonly[ ]the[ ]default
    | \bat[ ](?:most|least)\b | \bmaximum | \bminimum | \b(?:great|larg|small|high|low|long|short)er
    | \bless[ ]than | \bexceed | \btoo[ ](?:large|small|long|short|high|low|many|few|big)
    | \bnot[ ]support[ ]\S*\d | \b(?:not[ ]a|invalid)[ ](?:valid[ ])?(?:type|value|bool\w*|int\w*
        |number|float|str\w*|list|object|array|dict\w*)\b
    | \bcontext[ ](?:length|window|size)
    | (?:value|type|format)[ ]of\b | \bvalue[ ].{1,20}[ ]for\b | =\s*\S+[ ](?:is|are)\b
    | \blimit[ ]was[ ]reached""",
    re.IGNORECASE | re.VERBOSE,
)
# Words before a list of what the server does know, or before advice.
_KNOWN: Final = re.compile(
    r"""\bone[ ]of\b
    | (?<!not[ ])\bexpected\b(?=\s*(?:[:`'"\[(]|one|any|either|field|key|a\b))
    | (?<!not[ ])(?<!n't[ ])(?<!longer[ ])(?<!currently[ ])(?<!yet[ ])\b(?:known|valid|supported
        |allowed|accepted|permitted|available|possible
        |recogni[sz]ed|legal)\s*(?:\w+[ ])?(?:fields|param\w*s|arguments|keys|options|propert\w*
        |inputs|names|attributes|values)?\s*(?:are\b|is\b|include\b|[:=]|\[|\()
    | (?<!not[ ])(?<!any[ ])\b(?:known|valid|supported|allowed|accepted|permitted)[ ]
        (?:fields|parameters|arguments|keys|options|properties)\b(?!\W*$)
    | \b(?:had|has|with)[ ](?:the[ ])?(?:keys|fields)\b | \bonly[ ](?:the[ ])?(?:following|these)
    | \bdid[ ]you[ ]mean\b | \binstead\b | \b(?:use(?![ ]of)|try|choose|see)\b | \brather[ ]than\b
    | \bin[ ]request\b | [{](?=.*['"](?:messages|prompt|stream|model)['"])""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_CONDITION: Final = re.compile(
    r"\b(?:when|if|unless|because|since|while|together|alongside|without|combin\w+)\b",
    re.IGNORECASE,
)
_SENTENCES: Final = re.compile(r"(?<=[.;!?])\s+|\n+|\s*;\s*")
_AT_LEAST: Final = re.compile(
    r"""(?:>=?|≥|at[ ]least|minimum(?:[ ]\w+)*?(?:[ ]is|[ ]of|:|[ ]value)?|greater[ ]than(?:[ ]or
    [ ]equal[ ]to)?|no[ ]less[ ]than|not[ ]less[ ]than|(?:ge|gt|minimum)['"]?:|between)\D{0,3}(\d+)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_TOO_SHORT: Final = re.compile(
    r"too (?:small|short|low|few)|minimum|at least|higher|larger|greater|increase|>="
    r"|limit was reached|less than (?:the )?min",
    re.IGNORECASE,
)
_NOT_SHORT: Final = re.compile(
    r"at most|maximum|exceed|too (?:large|long|high|many|big)|<=|reduce", re.IGNORECASE
)

_ECHOES: Final = frozenset(
    {"input", "body", "request", "ctx", "value", "received", "url", "schema"}
)
_PLACES: Final = frozenset(
    {"loc", "param", "parameter", "field", "path", "property", "propertyname", "instancepath"}
    | {"pointer", "additionalproperty", "unevaluatedproperty", "keys", "argument", "source"}
    | {"propertypath", "data_path", "datapath", "unknown_fields", "fields", "location", "attr"}
)
_MAY_BE_A_URL: Final = frozenset({"path", "source", "location", "pointer", "fields", "keys"})
_HOLD_PLACES: Final = ("source", "params")  # objects about the place of the error around them
_CONTAINERS: Final = frozenset(
    {"", "#", "$", "body", "request", "json", "data", "root", "__root__", "query", "payload"}
    | {"none", "null", "requestbody", "request_body", "kwargs", "extra_body"}
)
_DETAILS: Final = frozenset(
    {"loc", "msg", "message", "error", "errors", "detail", "details", "type", "code"}
)


Places = tuple[str, ...] | None


class Complaint(NamedTuple):
    """`places`: the keys of ours that the error points to; None: it points to nothing, and () to
    what is no key of ours."""

    places: Places
    texts: list[str]


def refused_fields(body: bytes, keys: Collection[str]) -> list[str]:
    """The keys that the server says it does not know or support, in the order of `keys`."""
    found = {one for complaint in _complaints(body, keys) for one in _refused(complaint, keys)}
    return [key for key in keys if key in found]


def hinted_field(body: bytes, key: str, others: Collection[str]) -> str | None:
    """The one of `others` that the server wants in place of `key`."""
    texts = [text for complaint in _complaints(body, [key]) for text in complaint.texts]
    if any(_OF_A_VALUE.search(text) for text in texts):
        return None
    sentences = [one for text in texts for one in _SENTENCES.split(text)]
    wanted = re.compile(
        r"\b(?:use|instead|try|see|replaced|renamed|prefer|rather|switch)", re.IGNORECASE
    )
    hints = [one for one in sentences if wanted.search(one)]
    return next((other for other in others if any(_named(one, [other]) for one in hints)), None)


def longer_length(body: bytes, keys: Collection[str], tokens: int) -> int | None:
    """How many tokens to ask for where the server says that `tokens` are too few for an answer,
    whose limit is one of `keys`; None: it does not say so."""
    for complaint in _complaints(body, keys):
        text = " ".join(complaint.texts)
        if not complaint.places and not _named(text, keys):
            continue
        least = [int(number) for number in _AT_LEAST.findall(text) if len(number) < 7]
        more = [number for number in least if tokens < number <= _LONGEST]
        if more:
            return min(more)
        if tokens < LONGER and _TOO_SHORT.search(text) and not _NOT_SHORT.search(text):
            return LONGER
    return None


def _refused(complaint: Complaint, keys: Collection[str]) -> Iterator[str]:
    sentences = [
        one for text in complaint.texts for one in _SENTENCES.split(text) if _says_unknown(one)
    ]
    if complaint.places is not None:
        if sentences and not any(_OF_A_VALUE.search(text) for text in complaint.texts):
            yield from complaint.places
        return
    for one in sentences:
        yield from _subjects(one, keys)


def _says_unknown(sentence: str) -> bool:
    return bool(_UNKNOWN.search(sentence)) and not _OF_A_VALUE.search(sentence)


def _subjects(sentence: str, keys: Collection[str]) -> list[str]:
    """What the sentence is about: before a list of what is known, and before a condition."""
    about = _KNOWN.split(sentence, maxsplit=1)[0]
    if not _UNKNOWN.search(about):
        return []
    return _named(_CONDITION.split(about, maxsplit=1)[0], keys) or _named(about, keys)


def _named(text: str, keys: Collection[str]) -> list[str]:
    """A key after another and a dot is part of it: that other one is not meant."""
    text = re.sub(r"stream_options\W{1,6}(?=(?:include|continuous)_[a-z])", "", text)
    return [
        key
        for key in keys
        if re.search(rf"(?:(?<=body/)|(?<=data/)|(?<![\w-])(?<!\w/)){key}(?!\.?[\w/-])", text)
    ]


def _complaints(body: bytes, keys: Collection[str]) -> Iterator[Complaint]:
    for count, one in enumerate(_walk(_value_of(body[:_MOST_BYTES]), None, keys, 0)):
        if count < _MOST_DETAILS:
            yield one


def _value_of(body: bytes) -> Any:
    """A body in JSON, in lines of events, or in words."""
    try:
        return msgspec.json.decode(body)
    except NONSENSE:
        text = body.decode("utf-8", "replace")
    data = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
    return [_value_of(one.encode()) for one in data] if data else text


def _walk(value: Any, places: Places, keys: Collection[str], depth: int) -> Iterator[Complaint]:
    if depth > _DEEPEST:
        return
    if isinstance(value, str):
        yield from _in_words(value, places, keys, depth)
    elif isinstance(value, list):
        for one in value:
            yield from _walk(one, places, keys, depth + 1)
    elif isinstance(value, dict):
        yield from _in_an_object(value, places, keys, depth)


def _in_an_object(
    value: dict[Any, Any], places: Places, keys: Collection[str], depth: int
) -> Iterator[Complaint]:
    """The sentences of one object belong together, and to the place that it names."""
    parts = {str(key): one for key, one in value.items() if key not in _ECHOES}
    for key in _HOLD_PLACES:
        if isinstance(parts.get(key), dict):
            parts |= parts.pop(key)
    for key in [key for key in parts if key.lower() in _PLACES]:
        if not isinstance(parts[key], dict):
            places = _places_of(parts.pop(key), key.lower(), keys, places)
    texts = [
        one
        for key, one in parts.items()
        if isinstance(one, str) and key not in keys and _inner(one) is None
    ]
    if places is None and len(texts) > 1:  # a code, and the field's name alone
        places = tuple(key for key in keys if key in texts) or None
    if texts:
        yield Complaint(places, [_unfolded(text) for text in texts])
    for key, one in parts.items():
        if one not in texts:
            yield from _walk(one, (key,) if key in keys else places, keys, depth + 1)


def _in_words(text: str, places: Places, keys: Collection[str], depth: int) -> Iterator[Complaint]:
    inner = _inner(text)
    if inner is None:
        yield Complaint(places, [_unfolded(text)])
    else:
        for one in inner:
            yield from _walk(one, places, keys, depth + 1)


def _places_of(value: Any, name: str, keys: Collection[str], before: Places) -> Places:
    """The last part of a path that is no number, or several keys side by side. Names of types in
    unions are passed over."""
    values = value if isinstance(value, list | tuple) else [value]
    parts = [part for one in values for part in re.split(r"[./\[\]'\"\s]+", str(one))]
    parts = [part for part in parts if part.lower() not in _CONTAINERS and not part.isdigit()]
    parts = [part for part in parts if part in keys or not re.search(r"[A-Z(]", part)]
    if not parts:
        return before
    if name.endswith("s") and (found := tuple(part for part in parts if part in keys)):
        return found
    if parts[-1] in keys:
        return (parts[-1],)
    return before if name in _MAY_BE_A_URL else ()


def _unfolded(text: str) -> str:
    """An error of pydantic in words has its place in the line above."""
    return re.sub(r"\n[ \t]+", ": ", text[:_MOST_CHARS])


def _inner(text: str) -> list[Any] | None:
    """Errors that stand inside a text, in JSON or as Python shows them, and the words around."""
    found: list[Any] = []
    for line in [text, *text.splitlines()] if "\n" in text else [text]:
        begin = min((at for mark in "[{" if (at := line.find(mark)) >= 0), default=-1)
        end = max(line.rfind("]"), line.rfind("}"))
        value = _literal(line[begin : end + 1]) if 0 <= begin < end else None
        some = value if isinstance(value, list) else [value]
        if any(isinstance(one, dict) and _DETAILS & one.keys() for one in some):
            found += [line[:begin], value]
            if line is text:
                break
    return found or None


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except NONSENSE:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in a server's strings
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return None
