"""What a refusal says: in the words of servers of the field, one row a server."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.run.refusal import LIMIT_KEYS, hinted_field, longer_length, refused_fields

OPTIONS = ("include_usage", "continuous_usage_stats", "stream_options")
FIELDS = ("ignore_eos", "seed", *OPTIONS, "max_tokens", "max_completion_tokens")
EXTRA = {"type": "extra_forbidden", "msg": "Extra inputs are not permitted"}
IN_PYTHON = "{'type': 'extra_forbidden', 'loc': ('body', 'ignore_eos'), 'input': {'seed': 1}}"
IN_WORDS = (
    "2 validation errors for Request\nignore_eos\n  Extra inputs are not permitted "
    "[type=extra_forbidden, input_value=True, input_type=bool]\n    For further information visit "
    "https://errors.pydantic.dev/2.5/v/extra_forbidden\nseed\n  Extra inputs are not permitted"
)
GOOGLE = 'Unknown name "ignore_eos": Cannot find field.'
LENGTH = (
    "Could not finish the message because max_tokens or model output limit was reached. Please try "
    "again with higher max_tokens."
)
REASONING = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
    "'max_completion_tokens' instead."
)


def as_bytes(told: Any) -> bytes:
    return told.encode() if isinstance(told, str) else json.dumps(told).encode()


def error(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message} | fields}


UNKNOWN: dict[str, tuple[str, Any]] = {
    "openai": ("ignore_eos", error("Unrecognized request argument supplied: ignore_eos")),
    "openai, several": (
        "ignore_eos seed",
        error("Unrecognized request arguments supplied: ignore_eos, seed", param=None),
    ),
    "openai, by its place": (
        "ignore_eos",
        error("Invalid parameter", param="ignore_eos", code="unknown_parameter"),
    ),
    "openai, reasoning": (
        "max_tokens",
        error(REASONING, param="max_tokens", code="unsupported_parameter"),
    ),
    "azure": ("seed", error("Unknown parameter: 'seed'.", param="seed", code="unknown_parameter")),
    "fastapi": (
        "ignore_eos seed",
        {
            "detail": [
                {"loc": ["body", "ignore_eos"], "input": {"max_tokens": 24}} | EXTRA,
                {"loc": ["body", "ChatRequest", "seed"], "input": 1} | EXTRA,
                {"loc": ["body", "messages"], "type": "missing", "msg": "Field required"},
            ]
        },
    ),
    "fastapi, nested": (
        "include_usage",
        {"detail": [{"loc": ["body", "stream_options", "include_usage"]} | EXTRA]},
    ),
    "fastapi, of old": (
        "seed",
        {"detail": [{"loc": ["body", "seed"], "msg": "extra fields not permitted"}]},
    ),
    "vllm": ("ignore_eos", error(f"1 validation error:\n  {IN_PYTHON}\n\n  File x, line 3")),
    "vllm, of old": ("ignore_eos", {"object": "error", "message": f"[{IN_PYTHON}]", "code": 400}),
    "sglang": ("ignore_eos seed", {"object": "error", "message": IN_WORDS, "code": 400}),
    "llama.cpp": ("ignore_eos", error("Unsupported param: ignore_eos", code=400)),
    "tgi": ("ignore_eos", "Failed to deserialize: unknown field `ignore_eos` at line 1 column 30"),
    "serde": ("ignore_eos", "unknown field `ignore_eos`, expected one of `seed`, `max_tokens`"),
    "serde, of two": ("ignore_eos", "unknown field `ignore_eos`, expected `seed` or `model`"),
    "go": ("ignore_eos", {"error": 'json: unknown field "ignore_eos"'}),
    "jackson": (
        "ignore_eos",
        {
            "error": "Bad Request",
            "message": 'Unrecognized field "ignore_eos" (class a.B), not marked as ignorable (2 '
            'known properties: "seed", "max_tokens"])',
            "path": "/v1/chat/completions",
        },
    ),
    "json schema": ("ignore_eos", error("additionalProperties 'ignore_eos' were unexpected")),
    "json schema, several": (
        "ignore_eos seed",
        error("Additional properties are not allowed ('ignore_eos', 'seed' were unexpected)"),
    ),
    "ajv": (
        "seed",
        [
            {
                "instancePath": "",
                "params": {"additionalProperty": "seed"},
                "message": "must NOT have additional properties",
            }
        ],
    ),
    "zod": (
        "ignore_eos seed",
        {"issues": [{"code": "unrecognized_keys", "keys": ["ignore_eos", "seed"], "path": []}]},
    ),
    "nest": (
        "ignore_eos",
        {"statusCode": 400, "message": ["property ignore_eos should not exist"]},
    ),
    "marshmallow": ("ignore_eos", {"errors": {"json": {"ignore_eos": ["Unknown field."]}}}),
    "rails": ("seed", "found unpermitted parameter: :seed"),
    "python": ("ignore_eos", "create() got an unexpected keyword argument 'ignore_eos'"),
    ".net": (
        "seed",
        "The JSON property 'seed' could not be mapped to any .NET member of type 'X'.",
    ),
    "anthropic": (
        "ignore_eos",
        {"type": "error"} | error("ignore_eos: Extra inputs are not permitted"),
    ),
    "mistral": (
        "ignore_eos",
        {"object": "error", "message": {"detail": [{"loc": ["body", "ignore_eos"]} | EXTRA]}},
    ),
    "gemini": (
        "ignore_eos",
        error(
            f"Invalid JSON payload received. {GOOGLE}",
            status="INVALID_ARGUMENT",
            details=[{"fieldViolations": [{"description": GOOGLE}]}],
        ),
    ),
    "bedrock": (
        "ignore_eos seed",
        {
            "message": "Malformed input request: #: extraneous key [ignore_eos] is not permitted#: "
            "extraneous key [seed] is not permitted, please reformat your input and try again."
        },
    ),
    "cohere": (
        "ignore_eos",
        {"message": "unknown field: parameter ignore_eos is not a valid field"},
    ),
    "groq": ("seed", error("property 'seed' is unsupported, did you mean 'ignore_eos'?")),
    "fireworks": ("seed", error("Extra inputs are not permitted, field: 'seed', value: 1")),
    "litellm": (
        "seed",
        error("litellm.UnsupportedParamsError: x does not support parameters: {'seed': 1}, for m"),
    ),
    "litellm, of another": (
        "seed",
        error(f"litellm.BadRequestError: {json.dumps(error('Unknown', param='seed'))}"),
    ),
    "a code and a name": ("ignore_eos", error("ignore_eos", code="UnknownField")),
    "asp.net": (
        "seed",
        {"title": "Errors occurred.", "errors": {"seed": ["It is not supported."]}},
    ),
    "a schema": ("seed", "key seed not found in schema"),
    "an escape": ("seed", r"[{'loc': ('body', 'seed'), 'msg': 'unknown \d'}]"),
    "sets": ("seed", "Got unknown keys {'seed'}; expected keys: {'ignore_eos', 'max_tokens'}"),
    "an event": ("ignore_eos", "data: " + json.dumps(error("Unsupported param: ignore_eos"))),
    "an event in words": ("ignore_eos", "event: error\ndata: unknown field ignore_eos\n\n"),
    "a path of two": ("include_usage", "stream_options.include_usage: Extra inputs not permitted"),
    "all options": ("stream_options", "stream_options is not supported"),
    "all options, then a word": ("stream_options", "stream_options: property not allowed here"),
    "all options, in quotes": (
        "stream_options",
        "The JSON property 'stream_options' could not be mapped to any .NET member",
    ),
    "all options and another": ("ignore_eos stream_options", "unknown: stream_options, ignore_eos"),
    "newtonsoft": ("seed", {"errors": {"seed": ["Could not find member 'seed' on object"]}}),
    "a type": ("ignore_eos", error("Property 'ignore_eos' does not exist on type 'Request'")),
    "a model of keys": ("ignore_eos", error("ignore_eos: Key not in model")),
    "disabled": ("seed", error("`seed` has been disabled by the administrator")),
    "not enabled": ("seed", error("Feature seed is not enabled for this deployment")),
    "forbidden": ("seed", error("use of seed is forbidden")),
    "illegal": ("seed", error("Illegal field: seed")),
    "disallowed": ("seed", error("Disallowed parameter seed")),
    "excess": ("seed", error("Excess properties: [seed]")),
    "additional": ("ignore_eos", error("No additional fields: ignore_eos")),
    "customers": ("stream_options", error("stream_options is only available to some customers")),
    "under a condition": ("ignore_eos", "'ignore_eos' is not supported when 'seed' is given"),
    "what it had read": ("ignore_eos", 'Unknown field ignore_eos in {"model": "m", "seed": 1}'),
}
OTHERS: dict[str, Any] = {
    "a model": error("The model `seed` is unknown", param="model", code="model_not_found"),
    "a model's name": error("The model seed-oss-36b is not supported"),
    "messages": error("unknown role: seed", param="messages[0].role"),
    "allowed fields": "Unknown field foo. Allowed fields are seed, ignore_eos",
    "had keys": "Unknown key foo, object had keys [model, seed, ignore_eos]",
    "permitted": "unexpected value; permitted: 'seed', 'ignore_eos'",
    "permitted, with a field": "Unknown field `foo`. Permitted: `seed`, `max_tokens`",
    "expected": "unknown argument foo; expected: seed, ignore_eos",
    "one of": "foo is unknown and must be one of seed, ignore_eos",
    "a model that is gone": error("The model seed-oss does not exist", param="model"),
    "a value that is forbidden": error("seed=5 is forbidden"),
    "a value's range": "seed must be between 0 and 10",
    "another's range": "temperature out of range",
    "a value's type": "stream_options.include_usage must be boolean",
    "a value not supported": error(
        "Unsupported value: 'seed' does not support 1 with this model.",
        param="seed",
        code="unsupported_value",
    ),
    "a value, by a sign": "seed=1 is not supported; expected 0",
    "a value, in words": "Value 1 for seed is not allowed",
    "the value of": "The value of seed is not supported",
    "its type": "Unsupported type for seed: bool",
    "a condition": "stream_options can only be set when stream is true",
    "what it got": "Missing required field: 'messages' (got: model, seed, ignore_eos)",
    "a request in words": "Unknown role. The request contained model, seed and ignore_eos",
    "a number": {
        "detail": [{"loc": ["body", "seed"], "msg": "Input should be a valid integer", "input": 1}]
    },
    "an echo": {"detail": [{"loc": ["body", "x"], "input": {"seed": 1}} | EXTRA]},
    "a length": error(LENGTH),
    "too long": "max_tokens is too large: 24 > 16",
    "no JSON": 'Unexpected token s: "seed" is not valid JSON',
    "part of a word": "unknown: no_seed_found, reseed, seed_x",
    "nothing": "",
    "deep": "[" * 5000,
}


@pytest.mark.parametrize(("fields", "told"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_field_that_the_server_does_not_know(fields: str, told: Any) -> None:
    assert refused_fields(as_bytes(told), FIELDS) == fields.split()


@pytest.mark.parametrize("told", OTHERS.values(), ids=OTHERS.keys())
def test_a_refusal_for_another_reason_names_no_field(told: Any) -> None:
    assert refused_fields(as_bytes(told), FIELDS) == []


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        (REASONING, "max_completion_tokens"),
        ("Please use max_completion_tokens.", "max_completion_tokens"),
        ("Extra inputs are not permitted: max_tokens; see max_output_tokens", "max_output_tokens"),
        ("unknown field max_tokens", None),
        ("max_tokens must be at least 16, or use max_output_tokens", None),
    ],
)
def test_the_name_that_the_server_wants(told: str, hint: str | None) -> None:
    assert hinted_field(told.encode(), "max_tokens", LIMIT_KEYS[:3]) == hint


def test_a_wish_for_a_higher_limit_is_no_wish_for_another_name() -> None:
    assert hinted_field(LENGTH.encode(), "max_completion_tokens", ["max_tokens"]) is None


BELOW = "Invalid 'max_output_tokens': integer below minimum value. Expected a value >= 16, got 1."


@pytest.mark.parametrize(
    ("told", "asked", "longer"),
    [
        (BELOW, 1, 16),
        ("max_tokens must be at least 16", 1, 16),
        ("max_tokens must be between 16 and 4096", 13, 16),
        ({"detail": [{"loc": ["body", "max_tokens"], "msg": "should be >= 16"}]}, 1, 16),
        (LENGTH, 24, 512),
        (LENGTH, 512, None),
        ("max_tokens is too small", 24, 512),
        ("max_tokens is too large: 24 > 16", 24, None),
        ("maximum context length is 16 tokens, and max_tokens is 24: reduce it", 24, None),
        ("seed must be at least 16", 1, None),
        (error("must be at least 16", param="seed"), 1, None),
    ],
)
def test_a_limit_that_is_too_low(told: Any, asked: int, longer: int | None) -> None:
    assert longer_length(as_bytes(told), LIMIT_KEYS, asked) == longer


WORDS = st.sampled_from(
    ["unknown field", "seed", "loc", "msg", "param", "{'loc': ['seed']}", "\n "]
)
TOLD = st.recursive(
    st.none() | st.booleans() | st.floats() | WORDS | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=12,
)


@given(TOLD)
def test_any_answer_can_be_asked_what_it_refuses(told: Any) -> None:
    body = json.dumps(told).encode()
    assert set(refused_fields(body, FIELDS)) <= set(FIELDS)
    longer_length(body, LIMIT_KEYS, 1)
    hinted_field(body, "max_tokens", LIMIT_KEYS)


@pytest.mark.parametrize("part", ["{", "[", "unknown {", "unknown seed, ", '{"a": ', "\n "])
def test_a_long_refusal_takes_no_time(part: str) -> None:
    begun_s = time.process_time()
    refused_fields(part.encode() * 30_000, FIELDS)
    assert time.process_time() - begun_s < 2
