"""Streams as servers of the field send them, and what is true of each: a table in docs/streams.md.

A part is one write of the server, and nearly always one event. Its number says what is true:
the part with the first text is where the first token is, and a user who is to leave after two
tokens leaves after the part that brings the second.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
EARLY = "neither a finish reason nor [DONE]"
NOTHING = "without text, a finish reason or a count of tokens"

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OLD_HEAD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
ZERO = b"0\r\n\r\n"


class Odd(NamedTuple):
    """`first`: the part with the first text; None: there is none. `leaves`: the part after which a
    user leaves who is to leave after `planned` tokens; None: the answer ends before. `error`: "" if
    it is completed. `counted`: tokens and events of earlier answers, if these are known."""

    name: str
    parts: Sequence[bytes]
    tokens: int
    first: int | None
    leaves: int | None
    path: str = CHAT
    error: str = ""
    unread: str = ""
    head: bytes = HEAD
    end: bytes = ZERO
    planned: int = 2
    counted: Sequence[tuple[int, int]] = ()


def data(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def named(name: str, value: Any) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), text)


def choice(reason: Any = None, **fields: Any) -> bytes:
    one = {"index": 0, "logprobs": None, "finish_reason": reason} | fields
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return data(head | {"choices": [one]})


def delta(reason: Any = None, **fields: Any) -> bytes:
    return choice(reason, delta=fields)


def arguments(text: Any) -> bytes:
    return delta(tool_calls=[{"index": 0, "function": {"arguments": text}}])


def usage(tokens: Any = 3, choices: Any = ()) -> bytes:
    account = {"prompt_tokens": 8, "completion_tokens": tokens, "total_tokens": None}
    choices = list(choices) if isinstance(choices, tuple) else choices
    return data({"id": "chatcmpl-1", "model": "m", "choices": choices, "usage": account})


def response(kind: str, **fields: Any) -> bytes:
    return named(f"response.{kind}", {"type": f"response.{kind}"} | fields)


def message(kind: str, **fields: Any) -> bytes:
    return named(kind, {"type": kind} | fields)


def block(**fields: Any) -> bytes:
    return message("content_block_delta", index=0, delta=fields)


ROLE = delta(role="assistant", content="")
A, B, C = delta(content=" a"), delta(content=" b"), delta(content=" c")
STOP = delta("stop")
DONE = b"data: [DONE]\n\n"
TEXT = [ROLE, A, B, C]  # the second token comes with part 2
LAST = [STOP, DONE]

CREATED = response("created", response={"id": "r", "status": "in_progress", "usage": None})
COMPLETED = response(
    "completed",
    response={
        "id": "r",
        "status": "completed",
        "output": [{"type": "message", "content": [{"type": "output_text", "text": " a b c"}]}],
        "usage": {"input_tokens": 8, "output_tokens": 3},
    },
)
STARTED = message(
    "message_start",
    message={"id": "m", "role": "assistant", "content": [], "usage": {"input_tokens": 8}},
)
PING = message("ping")
STOPPED = [
    message("content_block_stop", index=0),
    message("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3}),
    message("message_stop"),
]


def begun(**fields: Any) -> bytes:
    return message("content_block_start", index=0, content_block=fields)


def deltas(kind: str, *texts: Any) -> list[bytes]:
    return [response(f"{kind}.delta", item_id="i", output_index=0, delta=text) for text in texts]


def everywhere(reason: Any) -> list[bytes]:
    """Three tokens, each with this finish reason, and no other."""
    return [ROLE, *(delta(reason, content=text) for text in (" a", " b", " c")), DONE]


def failing(name: str, event: bytes, words: str, *more: bytes, **how: Any) -> Odd:
    """It fails with these words after its second token."""
    return Odd(name, [ROLE, A, B, event, *more], 2, 1, 2, error=words, **how)


NOT_TEXTS = [
    *("thought_signature", "uuid", "timestamp", "created_time", "hash", "version", "seed", "lang"),
    *("agent", "state", "kv_transfer_params", "p", "request_id", "trace", "cost", "nonce", "stage"),
    *(
        "requestId",
        "createdAt",
        "traceID",
        "modelVersion",
        "finishReason",
        "trace-id",
        "total_cost",
        "model_name",
        "prompt_cache_key",
        "reasoning_effort",
        "detected_language",
        "stop_details",
        "warning",
        "progress",
    ),
]
SHAPES = [
    *("5d41402abc4b2a76b9719d911017c592", "0f8fad5b-d9cb-469f-a165-70867728950e"),
    *("2026-11-26T12:00:00.123Z", "2026-11-26 12:00:00", "1764158400000000000"),
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "EqQBCgIYAhIM1gbcDa9GJwZA2b3hGgxBdjrkzLoky3dl1pkiMOYds==",
]


ELSEWHERE = [
    Odd(
        "reasoning, then content",
        [ROLE, delta(reasoning="hm"), delta(reasoning="so"), A, *LAST],
        *(3, 1, 2),
    ),
    Odd("reasoning_content", [ROLE, delta(reasoning_content="hm"), A, B, *LAST], 3, 1, 2),
    Odd(
        "reasoning_details, with a signature at the end",
        [
            ROLE,
            delta(reasoning_details=[{"type": "reasoning.text", "text": "hm", "index": 0}]),
            delta(reasoning_details=[{"type": "reasoning.summary", "summary": "so"}]),
            delta(reasoning_details=[{"type": "reasoning.encrypted", "data": "Zm9v"}]),
            delta(reasoning_details=[{"type": "reasoning.text", "signature": "Zm9v"}]),
            *(A, *LAST),
        ],
        *(3, 1, 2),
    ),
    Odd(
        "thinking, in a field of its own",
        [ROLE, delta(thinking="hm"), delta(thinking_blocks=[{"thinking": "so"}]), A, *LAST],
        *(3, 1, 2),
    ),
    Odd(
        "a tool call: its name, then its arguments",
        [
            delta(role="assistant", content=None),
            delta(tool_calls=[{"index": 0, "id": "call_1", "type": "function", "function": {}}]),
            delta(tool_calls=[{"index": 0, "function": {"name": "weather", "arguments": ""}}]),
            *(arguments('{"city"'), arguments(': "Rome"}'), delta("tool_calls"), DONE),
        ],
        *(3, 2, 3),
    ),
    Odd(
        "arguments alone",
        [arguments("{"), arguments('"a"'), arguments(": 1}"), delta("tool_calls"), DONE],
        *(3, 0, 1),
    ),
    Odd(
        "arguments as an object",
        [ROLE, arguments({"id": 1}), arguments({"city": "Rome"}), delta("tool_calls"), DONE],
        *(2, 1, 2),
    ),
    Odd(
        "a function_call",
        [
            delta(role="assistant", function_call={"name": "weather", "arguments": ""}),
            *(delta(function_call={"arguments": text}) for text in ('{"a"', ": 1}")),
            *(delta("function_call"), DONE),
        ],
        *(3, 0, 1),
    ),
    Odd(
        "a custom tool's input",
        [ROLE, *(delta(tool_calls=[{"custom": {"input": text}}]) for text in "abc"), *LAST],
        *(3, 1, 2),
    ),
    Odd("a refusal", [ROLE, *(delta(refusal=text) for text in "abc"), *LAST], 3, 1, 2),
    Odd(
        "audio: data and transcript",
        [
            delta(role="assistant", audio={"id": "audio_1", "transcript": ""}),
            *(delta(audio={"transcript": " a"}), delta(audio={"data": "UklGRg=="})),
            *(delta(audio={"expires_at": 1900000000}), *LAST),
        ],
        *(2, 1, 2),
    ),
    Odd(
        "content as a list of parts",
        [ROLE, *(delta(content=[{"type": "text", "text": text}]) for text in "abc"), *LAST],
        *(3, 1, 2),
    ),
    Odd(
        "a field that nobody knows yet",
        [ROLE, *(delta(ponder={"parts": [{"said": text}]}) for text in "abc"), *LAST],
        *(3, 1, 2),
    ),
    Odd("a text outside the delta", [ROLE, *(choice(thought=t) for t in "abc"), *LAST], 3, 1, 2),
    *(
        Odd(
            f"events that are wrapped in `{key}`",
            [
                *(data({"code": 0, key: {"choices": [{"delta": {"content": t}}]}}) for t in "abc"),
                data({"code": 0, key: {"choices": [{"delta": {}, "finish_reason": "stop"}]}}),
            ],
            *(3, 0, 1),
        )
        for key in ("data", "result", "output")
    ),
    Odd(
        "text that is wrapped without a choice, under a name (DashScope's own)",
        [
            *(named("result", {"output": {"text": t, "finish_reason": "null"}}) for t in "abc"),
            named("result", {"output": {"text": "", "finish_reason": "stop"}}),
        ],
        *(3, 0, 1),
    ),
    Odd("events that are texts of JSON", [data(one[6:].decode()) for one in (A, B, STOP)], 2, 0, 1),
    Odd(
        "`message` in place of `delta`",
        [*(choice(message={"role": "assistant", "content": text}) for text in "abc"), *LAST],
        *(3, 0, 1),
    ),
    Odd(
        "much that is no text, before it and with it",
        [
            delta(role="assistant", id="a", type="message", channel="final", signature="Zm9v"),
            delta(annotations=[{"type": "url_citation", "url_citation": {"title": "t"}}]),
            choice(delta={}, content_filter_results={"hate": {"severity": "safe"}}),
            choice(delta={}, matched_stop="</s>", logprobs={"content": [{"token": "x"}]}),
            delta(content=" a", phase="final", provider_specific_fields={"note": "n"}),
            *(B, *LAST),
        ],
        *(2, 4, 5),
    ),
    Odd(
        "`message` and an empty delta",
        [
            choice(delta={"role": "assistant"}, message={"role": "assistant", "content": ""}),
            *(choice(delta={}, message={"content": text}) for text in "ab"),
            choice(delta={"role": "assistant"}, message={"role": "assistant", "content": "c"}),
            choice("stop", delta={}, message={"content": "abc"}),
            DONE,
        ],
        *(3, 1, 2),
    ),
    Odd(
        "the whole message with the last delta",
        [ROLE, A, B, choice("stop", delta={}, message={"content": " a b"}), DONE],
        *(2, 1, 2),
    ),
    Odd(
        "the whole message at the end, without a delta",
        [ROLE, A, B, choice("stop", message={"content": " a b"}), DONE],
        *(2, 1, 2),
    ),
    Odd(
        "messages in place of deltas, the last with the end",
        [*(choice(message={"content": text}) for text in "ab"), choice("stop", message="c")],
        *(3, 0, 1),
    ),
    Odd(
        "no delta has text, only the message of the end",
        [ROLE, choice("stop", delta={}, message={"content": "whole"}), DONE],
        *(1, 1, None),
    ),
    Odd(
        "fields of all names that are no text",
        [ROLE, *(delta(**{key: "some words"}) for key in NOT_TEXTS), A, B, *LAST],
        *(2, 1 + len(NOT_TEXTS), 2 + len(NOT_TEXTS)),
    ),
    Odd(
        "unknown fields in the shape of ids, times and blobs",
        [ROLE, *(delta(novelty=text) for text in SHAPES), A, B, *LAST],
        *(2, 1 + len(SHAPES), 2 + len(SHAPES)),
    ),
    Odd(
        "content in the shape of a hash",
        [ROLE, *(delta(content=text) for text in SHAPES[:2]), A, *LAST],
        *(3, 1, 2),
    ),
    Odd(
        "a new field, then content: both are text",
        [ROLE, delta(musing=" well"), A, B, *LAST],
        *(3, 1, 2),
    ),
    Odd(
        "unknown fields of the choice that come with a finish reason",
        [ROLE, A, B, choice("stop", delta={}, verdict="well done", extra={"note": "n"}), DONE],
        *(2, 1, 2),
    ),
    Odd(
        "completions with reasoning",
        [*(choice(text="", reasoning=text) for text in "ab"), choice("stop", text=" c"), DONE],
        *(3, 0, 1),
        path=COMPLETIONS,
    ),
    Odd(
        "a completion's text",
        [*(choice(text=text) for text in "abc"), choice("length", text=""), DONE],
        *(3, 0, 1),
        path=COMPLETIONS,
    ),
    Odd(
        "Responses: text",
        [
            CREATED,
            *deltas("output_text", " a", " b"),
            response("output_text.done", text=" a b"),
            COMPLETED,
        ],
        *(2, 1, 2),
        path=RESPONSES,
    ),
    Odd(
        "Responses: reasoning and its summary",
        [
            CREATED,
            *deltas("reasoning_text", "a"),
            *deltas("reasoning_summary_text", "b"),
            *deltas("output_text", "c"),
            COMPLETED,
        ],
        *(3, 1, 2),
        path=RESPONSES,
    ),
    Odd(
        "Responses: arguments of a function, input of a tool",
        [
            CREATED,
            *deltas("function_call_arguments", "{", "}"),
            *deltas("custom_tool_call_input", "a"),
            COMPLETED,
        ],
        *(3, 1, 2),
        path=RESPONSES,
    ),
    Odd(
        "Responses: refusal and an audio's transcript",
        [CREATED, *deltas("refusal", "a", "b"), *deltas("audio_transcript", "c"), COMPLETED],
        *(3, 1, 2),
        path=RESPONSES,
    ),
    Odd(
        "Messages: text",
        [
            STARTED,
            begun(type="text", text=""),
            PING,
            *(block(type="text_delta", text=text) for text in "abc"),
            *STOPPED,
        ],
        *(3, 3, 4),
        path=MESSAGES,
    ),
    Odd(
        "Messages: thinking, signed, then text",
        [
            STARTED,
            begun(type="thinking", thinking="", signature=""),
            *(block(type="thinking_delta", thinking=text) for text in "ab"),
            block(type="signature_delta", signature="Zm9v"),
            block(type="text_delta", text="c"),
            *STOPPED,
        ],
        *(3, 2, 3),
        path=MESSAGES,
    ),
    Odd(
        "Messages: details of the end",
        [
            STARTED,
            *(block(type="text_delta", text=text) for text in "ab"),
            message(
                "message_delta",
                delta={"stop_reason": "refusal", "stop_details": {"category": "some words"}},
            ),
            message("message_stop"),
        ],
        *(2, 1, 2),
        path=MESSAGES,
    ),
    Odd(
        "Messages: the input of a tool",
        [
            STARTED,
            begun(type="tool_use", id="toolu_1", name="weather", input={}),
            *(block(type="input_json_delta", partial_json=text) for text in ("", "{", "}")),
            *STOPPED,
        ],
        *(2, 3, 4),
        path=MESSAGES,
    ),
    Odd(
        "Messages: a block that begins with text, and citations",
        [
            STARTED,
            begun(type="redacted_thinking", data="Zm9v"),
            begun(type="text", text="a"),
            block(type="citations_delta", citation={"cited_text": "t"}),
            block(type="text_delta", text="b"),
            *STOPPED,
        ],
        *(2, 2, 4),
        path=MESSAGES,
    ),
]
NO_REASONS = [
    *("unknown", "N/A", "pending", "streaming", "continue", "in-progress", "In Progress", "-"),
    *("FINISH_REASON_UNSPECIFIED", "STOP_REASON_UNKNOWN", "not finished", "partial", "..."),
]
ENDS_OF_ALL_KINDS = [
    *(b'data: "[DONE]"\n\n', b"data: DONE\n\n", b"data: [done]\n\n", b"data: done\n\n"),
    *(b"event: done\ndata: {}\n\n", b"event: end\ndata: bye\n\n", b"event: complete\n\n"),
    *(data({"done": True}), data({"type": "done"}), data({"event": "end"})),
    *(data({"status": "completed"}), data(["[DONE]"]), b"data: data: [DONE]\n\n", b"[DONE]\n"),
    *(data({"data": "[DONE]"}), data({"choices": [{"index": 0, "done": True}]})),
]
ENDS = [
    Odd('a finish reason of ""', everywhere(""), 3, 1, 2),
    Odd("a finish reason of blanks", everywhere(" \n"), 3, 1, 2),
    Odd("a finish reason in words for none", everywhere("null"), 3, 1, 2),
    Odd("a finish reason of false", everywhere(False), 3, 1, 2),
    Odd("a finish reason of 0", everywhere(0), 3, 1, 2),
    Odd("a finish reason `not_finished`", everywhere("NOT_FINISHED"), 3, 1, 2),
    Odd("`stop` on every event", everywhere("stop"), 3, 1, 2),
    Odd("`stop` too early, and text after it", [ROLE, delta("stop"), A, B, C, *LAST], 3, 2, 3),
    Odd("`stop` with the first text", [ROLE, delta("stop", content=" a"), B, DONE], 2, 1, 2),
    Odd("a finish reason as an object", [*TEXT, delta({"type": "length"}), DONE], 3, 1, 2),
    Odd("[DONE] without a finish reason", [*TEXT, DONE], 3, 1, 2),
    Odd("a finish reason without [DONE]", [*TEXT, STOP], 3, 1, 2),
    Odd("a finish reason with the last text", [ROLE, A, B, delta("stop", content=" c")], 3, 1, 2),
    Odd("a finish reason and nothing else", [ROLE, *LAST], 0, None, None),
    Odd("neither a finish reason nor [DONE]", TEXT, 3, 1, 2, error=EARLY),
    *(
        Odd(f"the finish reason {reason!r} on every event", everywhere(reason), 3, 1, 2)
        for reason in NO_REASONS
    ),
    *(
        Odd(
            f"the finish reason {reason!r} on the first event, and no other",
            [delta(reason, role="assistant"), A, B, C],
            *(3, 1, 2),
            error=EARLY,
        )
        for reason in NO_REASONS
    ),
    *(
        Odd(f"an end that says {end.decode()!r}", [*TEXT, end], 3, 1, 2)
        for end in ENDS_OF_ALL_KINDS
    ),
    Odd("`finish_reason` in the delta", [*TEXT, delta(finish_reason="stop")], 3, 1, 2),
    Odd(
        "`finish_reason` in the delta with the last text",
        [ROLE, A, B, delta(content=" c", finish_reason="stop")],
        *(3, 1, 2),
    ),
    Odd(
        "`finish_reason` at the top",
        [*TEXT, data({"choices": [{"delta": {}}], "finish_reason": "stop"})],
        *(3, 1, 2),
    ),
    Odd("`finishReason`", [*TEXT, choice(delta={}, finishReason="STOP")], 3, 1, 2),
    Odd("`stop_reason` alone", [*TEXT, data({"choices": [{"stop_reason": "length"}]})], 3, 1, 2),
    Odd(
        "`stop` on the first event, then text without an end",
        [delta("stop", role="assistant"), A, B, C],
        *(3, 1, 2),
        error=EARLY,
    ),
    Odd("usage after [DONE]", [*TEXT, STOP, DONE, usage(3)], 3, 1, 2),
    Odd("[DONE] in an event that is not ended", [*TEXT, b"data: [DONE]"], 3, 1, 2),
    Odd("[DONE] in a line that is not ended", [*TEXT, b"data: [DONE]\n"], 3, 1, 2),
    Odd("a finish reason in an event that is not ended", [*TEXT, STOP[:-2]], 3, 1, 2),
    Odd("an event that is cut", [*TEXT, STOP[:-20]], 3, 1, 2, error=EARLY),
    Odd(
        "Ollama's own lines in events",
        [
            *(data({"message": {"content": text}, "done": False}) for text in "abc"),
            data(
                {"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 3}
            ),
        ],
        *(3, 0, 1),
    ),
    Odd(
        "Ollama's own lines of /api/generate in events",
        [
            *(data({"response": t, "done": False}) for t in "abc"),
            data({"response": "", "done": True}),
        ],
        *(3, 0, 1),
    ),
    Odd("[DONE] and nothing else", [DONE], 0, None, None, error=NOTHING),
    Odd("a role and [DONE]", [ROLE, DONE], 0, None, None, error=NOTHING),
    Odd("a count of 0 and [DONE]", [ROLE, usage(0), DONE], 0, None, None, error=NOTHING),
    Odd("no text, but a count of tokens", [ROLE, usage(7), DONE], 0, None, None),
    Odd("nothing at all", [], 0, None, None, error=EARLY),
    Odd("text after [DONE]", [*TEXT, *LAST, A, data({"error": "late"})], 3, 1, 2),
    Odd(
        "Messages: message_stop without a reason",
        [
            STARTED,
            block(type="text_delta", text="a"),
            block(type="text_delta", text="b"),
            message("message_stop"),
        ],
        2,
        1,
        2,
        path=MESSAGES,
    ),
]
ERRORS = [
    failing(
        "event: error, with a message and a code",
        named("error", {"message": "engine died", "code": 500}),
        *("engine died", DONE),
    ),
    failing("event: error, in plain text", named("error", b"engine died"), "engine died", DONE),
    failing("event: error, without data", b"event: error\n\n", "no reason given", DONE),
    failing("event: error, data: [DONE]", named("error", b"[DONE]"), "no reason given"),
    failing(
        "an error with a reason to finish after it",
        data({"error": {"message": "engine died", "type": "server_error"}}),
        *("engine died", STOP, DONE),
    ),
    failing("an error as a text", data({"error": "engine died"}), "engine died", DONE),
    failing(
        "an error that says true, and its words in another field",
        data({"error": True, "message": "engine died"}),
        *("engine died", DONE),
    ),
    failing(
        "errors as a list", data({"errors": [{"message": "engine died"}]}), "engine died", DONE
    ),
    failing(
        "an error and a text in one event",
        data({"error": {"message": "engine died"}})[:-1] + C,
        *("engine died", DONE),
    ),
    failing("a detail, and no finish reason", data({"detail": "engine died"}), "engine died", DONE),
    failing("a detail, and the end", data({"detail": "engine went away"}), "engine went away"),
    failing(
        "a message, and the end",
        data({"message": "the model is moved"}),
        "the server's last words are: the model is moved",
    ),
    failing(
        "a message with a type, and the end",
        data({"type": "status", "message": "the model is moved"}),
        "the server's last words are: the model is moved",
    ),
    failing(
        "a text under a name, and the end",
        named("status", b"the model is moved"),
        "the server's last words are: the model is moved",
    ),
    Odd(
        "a message and [DONE]",
        [data({"message": "the model is moved"}), DONE],
        *(0, None, None),
        error="the server's last words are: the model is moved",
    ),
    failing(
        "a bare code and message",
        data({"code": 500, "message": "engine died"}),
        *("engine died", DONE),
    ),
    failing(
        "a code in words",
        data({"code": "internal_error", "message": "engine died"}),
        *("engine died", DONE),
    ),
    failing(
        "event: message, and an error in it",
        named("message", {"code": 500, "message": "engine died"}),
        *("engine died", DONE),
    ),
    failing("a status of 503", data({"status": 503, "message": "busy"}), "busy", DONE),
    Odd(
        "an object `error` before any token",
        [data({"object": "error", "message": "engine died", "code": 400}), DONE],
        *(0, None, None),
        error="engine died",
    ),
    Odd(
        "too many requests, said with status 200",
        [data({"error": {"code": 429, "message": "slow down"}}), DONE],
        *(0, None, None),
        error="slow down",
    ),
    Odd(
        "a JSON body in place of a stream",
        [b'{"error": {"message": "engine ', b'died"}}'],
        *(0, None, None),
        error="engine died",
    ),
    Odd("a web page", [b"<html>gateway</html>\n"], 0, None, None, error="'<html>gateway</html>'"),
    failing("a finish reason `error`", delta("error"), "finish reason 'error'", DONE),
    failing("a finish reason `abort`", delta("abort"), "aborted the request", DONE),
    Odd(
        "Responses: failed",
        [
            CREATED,
            *deltas("output_text", "a", "b"),
            response("failed", response={"status": "failed", "error": {"message": "engine died"}}),
        ],
        *(2, 1, 2),
        path=RESPONSES,
        error="engine died",
    ),
    Odd(
        "Responses: an error",
        [
            CREATED,
            *deltas("output_text", "a", "b"),
            named("error", {"type": "error"} | {"code": "server_error", "message": "engine died"}),
        ],
        *(2, 1, 2),
        path=RESPONSES,
        error="engine died",
    ),
    Odd(
        "Messages: overloaded",
        [
            STARTED,
            block(type="text_delta", text="a"),
            block(type="text_delta", text="b"),
            message("error", error={"type": "overloaded_error", "message": "Overloaded"}),
        ],
        *(2, 1, 2),
        path=MESSAGES,
        error="Overloaded",
    ),
]
PAGE = b"<html>\n<head><title>502 Bad Gateway</title></head>\n</html>\n\n"
INNER = {"error": {"message": "engine died"}}
# Each comes after the second token, and before the end; each says that the engine died.
OBJECTS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "delta": {}, **INNER}]},
    {"choices": [{"index": 0, "delta": INNER}]},
    {"choices": [{"index": 0, "delta": {"content": ""}, "error": "engine died"}]},
    {"choices": [], "base_resp": {"status_code": 1013, "status_msg": "engine died"}},
    {"header": {"code": 10013, "message": "engine died", "sid": "s"}},
    {"event": "error", "data": {"message": "engine died"}},
    {"event": "error", "data": "engine died"},
    {"result": INNER},
    {"data": INNER},
    {"response": INNER},
    {"fault": {"faultstring": "engine died", "detail": {"errorcode": "x"}}},
    {"ok": False, "message": "engine died"},
    {"success": False, "result": "engine died"},
    {"Error": "engine died"},
    {"Error": {"Message": "engine died", "Code": "Internal"}},
    {"errors": ["engine died"]},
    {"error_code": 17, "error_msg": "engine died"},
    {"errcode": -1, "errmsg": "engine died"},
    {"type": "abort", "message": "engine died"},
    {"type": "exception", "exception": {"message": "engine died"}},
    {"type": "overloaded_error", "message": "engine died"},
    {"status": "failed", "reason": "engine died"},
    {"code": "InvalidParameter", "message": "engine died"},
    {"code": -1, "message": "engine died"},
    {"level": "fatal", "msg": "engine died"},
    {"error": {"code": 0, "message": "engine died"}},
    {"error": [{"message": "engine died"}]},
    {"error": {"error": {"error": "engine died"}}},
    {"detail": [{"error": "engine died"}]},
    {"x_groq": {"id": "r", "error": "engine died"}},
    {"output": {"error": "engine died"}},
    {"ResponseMetadata": {"Error": {"Code": "X", "Message": "engine died"}}},
    {"__type": "ThrottlingException", "message": "engine died"},
    {"aborted": True, "reason": "engine died"},
    {"code": "E5001", "message": "engine died"},
    {"type": "error", "level": "warning", "message": "engine died"},
    {"success": 0, "message": "engine died"},
    {"state": "errored", "message": "engine died"},
    {"status": "rejected", "message": "engine died"},
    {"status": "RESOURCE_EXHAUSTED", "message": "engine died"},
    {"msg_type": "error", "message": "engine died"},
    {"message_type": "error", "content": "engine died"},
    {"Code": "InternalError", "Message": "engine died"},
    {"choices": [{"delta": {"content": ""}}], "code": 500, "message": "engine died"},
    {"errcode": 0, "errmsg": "engine died"},
    {"traceback": ["engine died"]},
    {"http_status_code": 503, "message": "engine died"},
    {"return_code": "FAIL", "return_msg": "engine died"},
    {"grpc_status": 14, "grpc_message": "engine died"},
    {"type": "RESOURCE_EXHAUSTED", "detail": "engine died"},
]
TEXTS = [
    b"data: error: engine died\n\n",
    b"data: engine died\n\n",
    b'data: "engine died"\n\n',
    b'data: ["error", "engine died"]\n\n',
    b'data: [["engine died"]]\n\n',
    b"data: RuntimeError: engine died\n\n",
    b"data: Traceback (most recent call last):\ndata: engine died\n\n",
    b"data: {'error': {'message': 'engine died'}}\n\n",
    b'data: {"error": {"message": "engine died"\n\n',
    b"event: status\ndata: error: engine died\n\n",
    b'error: {"code": 500, "message": "engine died"}\n\n',
    b"error: engine died\n\n",
    b"exception:engine died\n",
    b'{"error": {"message": "engine died"}}\n',
    b'{\n  "error": {\n    "message": "engine died"\n  }\n}\n\n',
    b"engine died\n",
    b"RuntimeError: engine died\n\n",
    b'event: cancelled\ndata: "engine died"\n\n',
    b"event: error\n: engine died\n\n",
]
NAMES = [
    *("failed", "abort", "aborted", "timeout", "exception", "fatal", "server_error", "timed_out"),
    *("rate_limit_exceeded", "request_rejected"),
]
REASONS = [
    *("insufficient_system_resource", "failed", "failure", "timeout", "timed_out", "exception"),
    *("server_error", "overloaded", "network_error", "EngineError"),
    *("out_of_memory", "preempted", "rate_limited", "deadline_exceeded"),
    *("upstream_closed", "worker_lost", "BadGateway"),
]
ERRORS += [
    failing(f"an error as {json.dumps(one)}", data(one), "engine died", *LAST) for one in OBJECTS
]
ERRORS += [
    failing(f"an error as {one.decode().strip()!r}", one, "engine died", DONE) for one in TEXTS
]
ERRORS += [
    failing(f"event: {name}", named(name, {"message": "engine died"}), "engine died", *LAST)
    for name in NAMES
]
ERRORS += [
    failing(f"a finish reason `{reason}`", delta(reason), f"finish reason '{reason}'", DONE)
    for reason in REASONS
]
ERRORS += [
    failing("a finish reason `cancelled`", delta("cancelled"), "aborted the request", DONE),
    failing(
        "SGLang's reason as an object",
        delta({"type": "abort", "message": "engine died", "status_code": 500}),
        *("aborted the request: engine died", DONE),
    ),
    failing("a status as a number", b"data: 503\n\n", "503", DONE),
    failing("a status as a number, with a dot", b"data: 503.\n\n", "503.", DONE),
    failing("a status line", b"data: 502 Bad Gateway\n\n", "502 Bad Gateway", DONE),
    failing("Internal Server Error", b"data: Internal Server Error\n\n", "Internal Server", DONE),
    failing("an end of a file", b"data: unexpected EOF\n\n", "unexpected EOF", DONE),
    failing("busy, and [DONE]", b"data: busy, try again later\n\n", "try again later", DONE),
    failing("busy, in Chinese", "data: 服务器繁忙\n\n".encode(), "繁忙", DONE),
    failing("something", b"data: Something went wrong\n\n", "Something went wrong", DONE),
    failing("a web page in an event", b"data: <html><h1>Busy</h1></html>\n\n", "Busy", DONE),
    failing("a web page between events", PAGE, "502 Bad Gateway", DONE),
    failing("an error after the finish reason", STOP, "engine died", b"data: engine died\n\n"),
    Odd(
        "an error in the choice of the last text, which no finish reason follows",
        [ROLE, A, choice(delta={"content": " b"}, error={"message": "engine died"}), DONE],
        *(2, 1, 2),
        error="engine died",
    ),
    Odd(
        "a web page in place of a stream",
        [PAGE],
        *(0, None, None),
        error="no stream of events, but '502 Bad Gateway'",
    ),
    Odd(
        "a JSON body of 20,000 bytes in place of a stream",
        [json.dumps({"trace": "x" * 20_000, "error": {"message": "engine died"}}).encode()],
        *(0, None, None),
        error="engine died",
    ),
    Odd(
        "the field `error` before any token",
        [b'error: {"message": "engine died"}\n\n', DONE],
        *(0, None, None),
        error="engine died",
    ),
    Odd(
        "Responses: failed, without a status",
        [
            *(CREATED, *deltas("output_text", "a", "b")),
            response("failed", response={"error": {"message": "engine died"}}),
        ],
        *(2, 1, 2),
        path=RESPONSES,
        error="engine died",
    ),
    Odd(
        "Responses: incomplete, with an error",
        [
            *(CREATED, *deltas("output_text", "a", "b")),
            response(
                "incomplete",
                response={"status": "incomplete", "error": {"message": "engine died"}},
            ),
        ],
        *(2, 1, 2),
        path=RESPONSES,
        error="engine died",
    ),
]
BEATS = [
    Odd("empty data", [b"data:\n\n", ROLE, A, b"data: \n\n", B, *LAST], 2, 2, 4),
    Odd(
        "event: ping, data: ping",
        [named("ping", b"ping"), A, named("ping", b"no failure, 0 lost"), B, *LAST],
        *(2, 1, 3),
    ),
    Odd("data: ping", [b"data: ping\n\n", A, b"data: keep-alive\n\n", B, *LAST], 2, 1, 3),
    Odd("pings in JSON", [data({"type": "ping"}), A, data("ping"), data({}), B, *LAST], 2, 1, 4),
    Odd("comments", [b": OPENROUTER PROCESSING\n\n", A, b":\n\n", B, *LAST], 2, 1, 3),
    Odd(
        "event: heartbeat, with a time",
        [named("heartbeat", {"message": "still here", "code": 1}), A, B, *LAST],
        *(2, 1, 2),
    ),
    Odd(
        "events of a gateway's own",
        [
            named("status", {"message": "queued", "status": "waiting"}),
            A,
            data({"code": 200, "message": "ok"}),
            named("progress", b"50 %"),
            B,
            *LAST,
        ],
        *(2, 1, 4),
    ),
    Odd(
        "answers under a name",
        [*(named("completion", json.loads(one[6:])) for one in (ROLE, A, B)), *LAST],
        *(2, 1, 2),
    ),
    Odd(
        "events about something else than the answer",
        [
            named("retry", b"the upstream timed out, another is asked"),
            named("log", {"level": "info", "message": "failed once"}),
            named("error_rate", b"0.2"),
            A,
            named("trace", {"status": 500}),
            named("metrics", {"errors": 3}),
            named("tool", {"type": "tool_result", "error": "no such city"}),
            B,
            *LAST,
        ],
        *(2, 3, 7),
    ),
    Odd(
        "pings with more", [b"data: : PING\n\n", A, b"data: [heartbeat] 12\n\n", B, *LAST], 2, 1, 3
    ),
    Odd(
        "Responses: the client's own metadata, repeated",
        [
            response("created", response={"status": "in_progress", "metadata": {"error": "E1"}}),
            *deltas("output_text", "a", "b"),
            COMPLETED,
        ],
        *(2, 1, 2),
        path=RESPONSES,
    ),
    Odd(
        "busy, and then the answer",
        [b"data: busy, try again later\n\n", A, b"data: [PROCESSING]\n\n", B, *LAST],
        *(2, 1, 3),
    ),
    Odd("an answer that ends at a closing tag", [A, delta("tag_closed"), DONE], 1, 0, None),
    Odd("no error, in Chinese", [data({"error": "没有错误"}), A, B, *LAST], 2, 1, 2),
    Odd(
        "wrapped text, next to a finish reason that is none",
        [data({"finish_reason": None, "data": {"text": one}}) for one in ("a", "b")] + [*LAST],
        *(2, 0, 1),
    ),
    Odd(
        "wrapped words about the queue",
        [data({"data": {"content": "3 ahead"}}), A, B, *LAST],
        2,
        1,
        2,
    ),
    Odd(
        "a time, invisible characters, blanks",
        [
            *(b"data: HEARTBEAT 2026-11-26T10:00:00Z\n\n", b"data: \xe2\x80\x8b\n\n", A),
            *(b"   \n", b"data: keepalive-12\n\n", B, *LAST),
        ],
        *(2, 2, 5),
    ),
    Odd("null", [data(None), A, data(None), B, *LAST], 2, 1, 3),
    Odd(
        "a tool of Responses that fails",
        [
            *(CREATED, *deltas("output_text", "a")),
            response("mcp_call.failed", item_id="i"),
            response(
                "output_item.done", item={"type": "mcp_call", "error": "x", "status": "failed"}
            ),
            *(*deltas("output_text", "b"), COMPLETED),
        ],
        *(2, 1, 4),
        path=RESPONSES,
    ),
    Odd(
        "a field that no event has",
        [
            b"dataset: a\n\nx-error-code: 0\n\nHTTP/1.1 200 OK\n\n",
            A,
            b"x-request-id: 7\n",
            B,
            *LAST,
        ],
        *(2, 1, 3),
        unread='"HTTP/1.1 200 OK" is in no event',
    ),
]
NOTHINGS: list[Any] = [None, "", 0, False, {}, []]
NOTICES: list[dict[str, Any]] = [
    {"message": "processing"},
    {"message": "retrying, the last try timed out"},
    {"detail": "warming up"},
    {"event": "progress", "message": "50 %", "data": {"done": 5}},
    {"type": "status", "status": "running", "message": "still there"},
    {"code": "queued"},
    {"code": "queued", "message": "third in line"},
    {"code": 20000, "message": "success"},
    {"code": 0, "msg": "ok"},
    {"code": 1000, "msg": "OK"},
    {"error_code": 0},
    {"errno": 0, "errmsg": "ok"},
    {"success": True, "message": "accepted"},
    *({"error": nothing} for nothing in NOTHINGS),
    {"error": {"code": 0, "message": "", "type": None, "param": {}}},
    {"error": {"code": 200, "message": "success"}},
    {"error": "none"},
    {"errors": []},
    {"error_count": 0, "error_rate": 0.5, "fault_tolerance": "on", "no_error": True},
    {"status": {"code": 200, "message": "fine"}},
    {"level": "warn", "msg": "slow"},
    {"timeout": 30},
    {"base_resp": {"status_code": 0, "status_msg": "success"}},
    {"errcode": 0, "errmsg": "processed"},
    {"error_code": "0000"},
    {"error_msg": "成功"},
    {"error": "no error occurred"},
    {"num_errors": 3},
    {"on_error": "retry"},
    {"retry_after_error": 1},
    {"code": "ERR_NONE"},
    {"status": "error-free"},
    {"status": "retrying after error"},
    {"status": "retrying", "code": 503},
    {"type": "info", "code": 429, "message": "rate limited, waiting"},
    {"type": "tool_result", "error": "no such city"},
    {"data": {"type": "tool_result", "error": "no such city"}},
    {"type": "timeout_warning"},
    {"metrics": {"errors": 3, "timeouts": 1}},
]
BEATS += [
    Odd(f"a notice: {json.dumps(one)}", [data(one), A, data(one), B, data(one), *LAST], 2, 1, 3)
    for one in NOTICES
]
HOLLOW: list[Any] = [
    None,
    "",
    0,
    False,
    {},
    {"code": 0, "message": ""},
    {"code": None, "details": []},
]
BEATS += [
    Odd(
        f"`error` is {json.dumps(one)} in all events",
        [
            *(data({"choices": [{"delta": {"content": t}}], "error": one}) for t in "ab"),
            data({"choices": [{"delta": {}, "finish_reason": "stop", "error": one}]}),
            data({"choices": [], "usage": {"completion_tokens": 3}, "error": one}),
            DONE,
        ],
        *(2, 0, 1),
    )
    for one in HOLLOW
]
INDICES: list[Any] = ["0", None, -1, 7.0, []]
TYPES = [
    Odd("`choices` is null in the closing usage", [*TEXT, STOP, usage(3, None), DONE], 3, 1, 2),
    Odd(
        "`choices` is an object",
        [data({"choices": {"delta": {"content": t}}}) for t in "abc"] + LAST,
        3,
        0,
        1,
    ),
    Odd("an empty usage", [*TEXT, STOP, data({"choices": [], "usage": {}}), DONE], 3, 1, 2),
    Odd('counts of 3.0 and "3"', [*TEXT, STOP, usage(3.0), usage("3"), DONE], 3, 1, 2),
    Odd(
        "counts that are none",
        [*TEXT, STOP, usage(-1), usage([3]), DONE],
        *(3, 1, 2),
        unread="`usage.completion_tokens` is -1",
    ),
    Odd(
        "indices of all kinds",
        [*(choice(index=number, delta={"content": " a"}) for number in INDICES), *LAST],
        *(5, 0, 1),
    ),
    Odd("a number as content", [ROLE, delta(content=7), delta(content=0.5), *LAST], 2, 1, 2),
    Odd("a delta as a text", [ROLE, choice(delta=" a"), choice(delta=" b"), *LAST], 2, 1, 2),
    Odd(
        "no JSON in between",
        [ROLE, A, b"data: {oops\n\n", B, *LAST],
        *(2, 1, 3),
        unread="'{oops' is no JSON",
    ),
    Odd(
        "nothing but what is no JSON",
        [b"data: oops\n\n", b"data: oops\n\n", DONE],
        *(0, None, None),
        error="could not be read: 'oops' is no JSON",
        unread="'oops'",
    ),
    Odd(
        "half a pair of surrogates",
        [ROLE, delta(content="\ud83d"), delta(content="\ude00"), *LAST],
        2,
        1,
        2,
    ),
    Odd("invalid UTF-8", [ROLE, A.replace(b" a", b"caf\xe9"), B, *LAST], 2, 1, 2),
    Odd("a line end inside a text", [ROLE, A.replace(b" a", b"a\ndata: a"), B, *LAST], 2, 1, 2),
    Odd(
        "no blank line between two events",
        [ROLE, A[:-1], B, *LAST],
        *(2, 2, 2),
    ),
]


def cut_inside_of(character: str) -> list[bytes]:
    event = f'data: {{"choices": [{{"delta": {{"content": "{character}"}}}}]}}\n\n'.encode()
    place = event.index(character.encode()) + 1
    return [event[:place], event[place:]]


TEXT_OF_TWO_LINES = b'data: {"choices": [{"delta":\ndata: {"content": " a"}}]}\n\n'
LINE_SEPARATOR = 'data: {"choices": [{"delta": {"content": "a\u2028b\u2029\x85"}}]}\n\n'.encode()
RIGHT = [
    Odd("an event in two `data:` lines", [ROLE, TEXT_OF_TWO_LINES, B, *LAST], 2, 1, 2),
    Odd("U+2028 in a text", [ROLE, LINE_SEPARATOR, B, *LAST], 2, 1, 2),
    Odd("CRLF", [one.replace(b"\n", b"\r\n") for one in (*TEXT, *LAST)], 3, 1, 2),
    Odd("CR alone", [one.replace(b"\n", b"\r") for one in (*TEXT, *LAST)], 3, 1, 2),
    Odd("a byte order mark", [b"\xef\xbb\xbf" + A, B, *LAST], 2, 0, 1),
    Odd("retry and id", [b"retry: 3000\nid: 1\n" + A, b"id: 2\n" + B, *LAST], 2, 0, 1),
    Odd(
        "no blank after `data:`",
        [one.replace(b"data: ", b"data:") for one in (A, B, *LAST)],
        2,
        0,
        1,
    ),
    Odd("[DONE] with blanks", [A, B, STOP, b"data:  [DONE] \n\n"], 2, 0, 1),
    Odd("a character cut in two", [ROLE, *cut_inside_of("é"), B, *LAST], 2, 2, 3),
    Odd("several events at once", [ROLE + A + B + C, *LAST], 3, 0, 0),
    Odd("HTTP/1.0", [*TEXT, *LAST], 3, 1, 2, head=OLD_HEAD, end=b""),
    Odd("trailers", [*TEXT, *LAST], 3, 1, 2, end=b"0\r\nx-tokens: 3\r\n\r\n"),
    Odd("a line of 20,000 bytes", [ROLE, delta(content="a", pad="x" * 20_000), B, *LAST], 2, 1, 2),
]
FOURS = [delta(content=text * 4) for text in "abcdef"]
MANY = [
    Odd(
        "4 tokens an event, as earlier answers showed: after 5",
        [ROLE, *FOURS, STOP, usage(24), DONE],
        *(24, 1, 2),
        planned=5,
        counted=[(24, 6), (13, 4)],
    ),
    Odd(
        "4 tokens an event, of which nothing is known: after 5",
        [ROLE, *FOURS, STOP, usage(24), DONE],
        *(6, 1, 5),
        planned=5,
    ),
    Odd(
        "token ids in each event: after 5",
        [
            *(choice(text=text, token_ids=[1, 2, 3]) for text in "abc"),
            choice("stop", text=""),
            DONE,
        ],
        *(9, 0, 1),
        planned=5,
        path=COMPLETIONS,
    ),
    Odd(
        "half a token an event, as earlier answers showed: after 3",
        [ROLE, *(delta(content=text) for text in "abcdefghij"), STOP, usage(5), DONE],
        *(5, 1, 5),
        planned=3,
        counted=[(12, 24)],
    ),
    Odd(
        "all in one event, as earlier answers showed: after 5",
        [ROLE, delta(content="abcdef" * 4), STOP, usage(24), DONE],
        *(1, 1, None),
        planned=5,
        counted=[(24, 1), (13, 1)],
    ),
]
GEMINI = {"candidates": [{"content": {"parts": [{"text": "a"}], "role": "model"}}]}
OTHERS = [
    Odd(
        "chat is asked for, Responses come",
        [CREATED, *deltas("output_text", "a", "b"), COMPLETED],
        *(0, None, None),
        error='set `dialect = "responses"`',
        unread='is of the dialect "responses"',
    ),
    Odd(
        "chat is asked for, Messages come",
        [STARTED, block(type="text_delta", text="a"), *STOPPED],
        *(0, None, None),
        error='set `dialect = "messages"`',
        unread='is of the dialect "messages"',
    ),
    Odd(
        "Responses are asked for, chat comes",
        [*TEXT, *LAST],
        *(0, None, None),
        path=RESPONSES,
        error='set `dialect = "chat"`',
        unread='is of the dialect "chat"',
    ),
    Odd(
        "Messages are asked for, completions come",
        [choice(text="a"), DONE],
        *(0, None, None),
        path=MESSAGES,
        error='set `dialect = "completions"`',
        unread='is of the dialect "completions"',
    ),
    Odd(
        "Ollama's own lines",
        [
            b'{"model":"m","message":{"content":"a"},"done":false}\n',
            b'{"done":true,"response":""}\n',
        ],
        *(0, None, None),
        error="of Ollama's own dialect: set `path`",
        unread="of Ollama's own dialect",
    ),
    Odd(
        "Gemini's own events",
        [data(GEMINI), data(GEMINI)],
        *(0, None, None),
        error="of Gemini's own dialect: set `path`",
        unread="of Gemini's own dialect",
    ),
    Odd(
        "Gemini's own list, in lines",
        [b"[" + json.dumps(GEMINI).encode() + b",\n", json.dumps(GEMINI).encode() + b"]\n"],
        *(0, None, None),
        error="of Gemini's own dialect: set `path`",
        unread="of Gemini's own dialect",
    ),
    Odd(
        "a dialect that nobody here knows",
        [data({"token": {"id": 1, "text": "a"}}), data({"token": {"id": 2, "text": "b"}})],
        *(0, None, None),
        error="nothing was found in events such as",
    ),
    Odd(
        "a whole answer in place of a stream",
        [
            json.dumps(
                {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}]}
            ).encode()
        ],
        *(0, None, None),
        error="a whole answer, and no server-sent event",
        unread="a whole answer",
    ),
]
KINDS = {
    "Text in other fields": ELSEWHERE,
    "Ends, and what is none": ENDS,
    "Errors in a 200": ERRORS,
    "Heartbeats, and other events": BEATS,
    "Loose types, and nonsense": TYPES,
    "Other dialects": OTHERS,
    "Framing": RIGHT,
    "Several tokens an event": MANY,
}
ALL = [odd for kind in KINDS.values() for odd in kind]
