"""From a TOML file to a checked model, or to one message with all mistakes: each names the key as
in the file, the value found and the values allowed, without pydantic's terms.
"""

import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from harness.errors import ConfigError, did_you_mean, in_words

Model = TypeVar("Model", bound=BaseModel)
_QUOTE: Final = "'"  # around pydantic's names of discriminators
_SECRETS: Final = frozenset(
    {"api_key", "apikey", "api-key", "api_token", "key", "token", "authorization", "password"}
    | {"secret"}
)

# The rule for a value, by pydantic's name for the mistake; fields come from the error's context.
RULES: Final = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a section of keys",
    "model_type": "must be a section of keys",
    "model_attributes_type": "must be a section of keys",
    "literal_error": "must be one of {expected}",
    "enum": "must be one of {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "string_too_short": "must have at least {min_length} characters",
}


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {in_words(error)}") from error


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """Split `a.b=value`. The value is TOML; a bare word is a string."""
    key, equals, text = setting.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set {setting}: must look like section.key=value")
    try:
        return path, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return path, text.strip()


def apply_settings(data: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    result = deepcopy(data)
    for setting in settings:
        path, value = parse_setting(setting)
        table = result
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {setting}: `{part}` is a value, not a section")
        table[path[-1]] = value
    return result


def validate(
    model: type[Model], data: dict[str, Any], *, source: str, settings: Sequence[str] = ()
) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        set_paths = {".".join(parse_setting(setting)[0]) for setting in settings}
        lines = []
        for detail in error.errors():
            key, table = _place(model, detail["loc"])
            is_unknown = detail["type"] == "extra_forbidden"  # then a section may be the mistake
            of = [one for one in sorted(set_paths) if _is_of(key, one, is_section=is_unknown)]
            where = f"--set {of[0]}" if of else source
            lines.append(f"{where}: {_explain(detail, key, table)}")
        raise ConfigError("\n".join(lines)) from error


def _is_of(key: str, setting: str, *, is_section: bool) -> bool:
    """Is the key what `--set` names, or a part of its value? `is_section`: or the section of it."""
    return f"{key}.".startswith(f"{setting}.") or (is_section and setting.startswith(f"{key}."))


def _explain(detail: ErrorDetails, key: str, table: type[BaseModel] | None) -> str:
    found, context = detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            allowed = sorted(table.model_fields) if table is not None else []
            name = str(detail["loc"][-1])
            if name.lower() in _SECRETS:
                return f"`{key}`: no secret stands in a file; name its variable: --api-key-env NAME"
            inside = [f"`{one}`" for one in _in_sections(table, name)] if name == key else []
            hint = f"; did you mean {' or '.join(inside)}?" if inside else ""
            hint = hint or did_you_mean(name, allowed)
            return f"unknown key `{key}`{hint or ';'} allowed: {', '.join(allowed)}"
        case "missing":
            return f"key `{key}` is missing"
        case "union_tag_not_found":
            return f"key `{key}.{context['discriminator'].strip(_QUOTE)}` is missing"
        case "union_tag_invalid":
            tag = context["discriminator"].strip(_QUOTE)
            return (
                f"`{key}.{tag}` must be one of {context['expected_tags']}, not {context['tag']!r}"
            )
        case "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            return f"`{key}`: {message}" if key else message
        case kind if kind in RULES:
            return f"`{key}` {RULES[kind].format_map(context)}, not {found!r}"
        case _:
            return f"`{key}`: {found!r} is refused: {detail['msg']}"


def _in_sections(table: type[BaseModel] | None, name: str) -> Iterator[str]:
    """The keys of this name in the sections of the table."""
    for section, field in ({} if table is None else table.model_fields).items():
        if any(name in model.model_fields for model in _models_in(field.annotation)):
            yield f"{section}.{name}"


def _place(
    model: type[BaseModel], location: Sequence[int | str]
) -> tuple[str, type[BaseModel] | None]:
    """The key of the file at pydantic's location, and the model of the table that it stands in.
    pydantic puts marks into a location: the tag of a union's member, and "[key]"."""
    keys: list[str] = []
    table: type[BaseModel] | None = model
    below: list[type[BaseModel]] = [model]
    for part in location:
        if len(below) > 1 and isinstance(part, str):
            below = [one for one in below if _is_tagged(one, part)]
            continue
        if part != "[key]":
            keys.append(str(part))
        table = below[0] if len(below) == 1 else None
        if table is not None and part in table.model_fields:
            below = list(_models_in(table.model_fields[str(part)].annotation))
    return ".".join(keys), table


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _is_tagged(model: type[BaseModel], tag: str) -> bool:
    return any(tag in get_args(field.annotation) for field in model.model_fields.values())
