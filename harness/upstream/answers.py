"""The bytes of an answer in each dialect's shape: events of a stream, a whole answer, an error.

The pieces of a stream: `opening` goes out with the first token, `token` once a token, `closing`
after the last one. `closing` comes in two parts, since the usage may be what a client leaves
before: all that stands before the usage, then the usage with all that follows.
"""

from typing import Any, Final

import msgspec

from harness.upstream.asked import Asked
from harness.workload.target import DialectName

DONE: Final = b"data: [DONE]\n\n"
MOST_PADDING: Final = 400_000  # characters of a word
_PLAIN: Final = (  # a token each in the usual vocabularies, for gateways that count themselves
    "time people year work world life part house place week case point water number group fact "
    "month right study book word side kind head home hand"
)
PLAIN_WORDS: Final = tuple(_PLAIN.split())
_encode: Final = msgspec.json.encode
_Event = dict[str, Any]


def error_body(path: str, status: int, message: str) -> bytes:
    kind = {429: "rate_limit_error", 400: "invalid_request_error", 404: "not_found_error"}
    error: _Event = {"type": kind.get(status, "api_error"), "message": message}
    if path.rstrip("/").endswith("/messages"):
        return _encode({"type": "error", "error": error})
    return _encode({"error": {**error, "param": None, "code": status}})


class DialectAnswer:
    """`number` names it; `created`: in seconds since 1970."""

    def __init__(self, asked: Asked, number: int, created: int) -> None:
        self.asked, self.number, self.created = asked, number, created

    def word(self, n: int) -> str:
        """The n-th, from 1 on."""
        if self.asked.order.words == "plain":
            return f" {PLAIN_WORDS[(n - 1) % len(PLAIN_WORDS)]}"
        return f" w{n}" + "x" * min(self.asked.order.pad, MOST_PADDING)

    def text(self, made: int) -> str:
        return "".join(map(self.word, range(1, made + 1)))

    def opening(self) -> bytes:
        return b""

    def token(self, n: int) -> bytes:
        raise NotImplementedError

    def closing(self, made: int) -> tuple[bytes, bytes]:
        raise NotImplementedError

    def whole(self, made: int) -> bytes:
        return _encode(self._whole(made))

    def _whole(self, made: int) -> _Event:
        raise NotImplementedError

    @property
    def is_counted(self) -> bool:
        return self.asked.usage != "none"


class _Older(DialectAnswer):
    """Completions; of `_Chat` the other names."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def token(self, n: int) -> bytes:
        return self._event([self._choice(self.word(n))], n if self.asked.usage == "each" else None)

    def closing(self, made: int) -> tuple[bytes, bytes]:
        used = made if self.asked.usage == "each" else None
        end = self._event([self._choice("", self._why)], used)
        return end, (self._event([], made) if self.is_counted else b"") + DONE

    def _whole(self, made: int) -> _Event:
        body = self._head(self.object) | {"choices": [self._whole_choice(self.text(made))]}
        return body | ({"usage": self._usage(made)} if self.is_counted else {})

    def _choice(self, text: str, why: str | None = None) -> _Event:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": why}

    def _whole_choice(self, text: str) -> _Event:
        return self._choice(text, self._why)

    @property
    def _why(self) -> str:
        return "length" if self.asked.is_cut else "stop"

    def _head(self, kind: str) -> _Event:
        name = f"{self.prefix}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.asked.model}

    def _event(self, choices: list[_Event], made: int | None) -> bytes:
        event = self._head(self.chunk_object) | {"choices": choices}
        if self.is_counted:
            event["usage"] = None if made is None else self._usage(made)
        return b"data: " + _encode(event) + b"\n\n"

    def _usage(self, made: int) -> _Event:
        prompt = self.asked.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }


class _Chat(_Older):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> bytes:
        role = self._choice("")
        role["delta"] = {"role": "assistant", "content": ""}
        return self._event([role], None)

    def _choice(self, text: str, why: str | None = None) -> _Event:
        delta = {"content": text} if text else {}
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": why}

    def _whole_choice(self, text: str) -> _Event:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": self._why}


def _named(event: _Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


class _Responses(DialectAnswer):
    def opening(self) -> bytes:
        part = {"type": "response.content_part.added", **self._place, "part": self._part("")}
        events: list[_Event] = [
            {"type": "response.created", "response": self._response("in_progress", 0)},
            {"type": "response.in_progress", "response": self._response("in_progress", 0)},
            {"type": "response.output_item.added", "output_index": 0, "item": self._item(None)},
            part,
        ]
        return self._numbered(0, events)

    def token(self, n: int) -> bytes:
        event = {"type": "response.output_text.delta", **self._place, "delta": self.word(n)}
        return self._numbered(3 + n, [event | {"logprobs": []}])

    def closing(self, made: int) -> tuple[bytes, bytes]:
        words, item = self.text(made), self._item(made)
        events: list[_Event] = [
            {"type": "response.output_text.done", **self._place, "text": words, "logprobs": []},
            {"type": "response.content_part.done", **self._place, "part": self._part(words)},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
        ]
        response = self._response(self._end, made)
        end = {"type": f"response.{self._end}", "response": response}
        return self._numbered(4 + made, events), self._numbered(7 + made, [end])

    def _whole(self, made: int) -> _Event:
        return self._response(self._end, made)

    @property
    def _end(self) -> str:
        return "incomplete" if self.asked.is_cut else "completed"

    @property
    def _place(self) -> _Event:
        return {"item_id": f"msg_{self.number}", "output_index": 0, "content_index": 0}

    def _numbered(self, first: int, events: list[_Event]) -> bytes:
        numbered = (event | {"sequence_number": first + n} for n, event in enumerate(events))
        return b"".join(map(_named, numbered))

    def _part(self, text: str) -> _Event:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, made: int | None) -> _Event:
        """Its `made` tokens; None: it has just begun."""
        return {
            "id": f"msg_{self.number}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if made is None else self._end,
            "content": [] if made is None else [self._part(self.text(made))],
        }

    def _response(self, status: str, made: int) -> _Event:
        has_ended = status != "in_progress"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self.number}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": None,
            "metadata": {},
            "model": self.asked.model,
            "output": [self._item(made)] if has_ended else [],
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0,
            "usage": self._usage(made) if has_ended and self.is_counted else None,
        }

    def _usage(self, made: int) -> _Event:
        prompt = self.asked.prompt_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + made,
        }


class _Messages(DialectAnswer):
    def opening(self) -> bytes:
        block = {"type": "text", "text": ""}
        message = self._message([], None, {"output_tokens": 1})
        start = {"type": "content_block_start", "index": 0, "content_block": block}
        events: list[_Event] = [
            {"type": "message_start", "message": message},
            start,
            {"type": "ping"},
        ]
        return b"".join(map(_named, events))

    def token(self, n: int) -> bytes:
        delta = {"type": "text_delta", "text": self.word(n)}
        return _named({"type": "content_block_delta", "index": 0, "delta": delta})

    def closing(self, made: int) -> tuple[bytes, bytes]:
        delta = {"stop_reason": self._why, "stop_sequence": None}
        end: _Event = {"type": "message_delta", "delta": delta}
        if self.is_counted:
            end["usage"] = {"output_tokens": made}
        before = _named({"type": "content_block_stop", "index": 0})
        return before, _named(end) + _named({"type": "message_stop"})

    def _whole(self, made: int) -> _Event:
        block = {"type": "text", "text": self.text(made)}
        return self._message([block], self._why, {"output_tokens": made})

    @property
    def _why(self) -> str:
        return "max_tokens" if self.asked.is_cut else "end_turn"

    def _message(self, content: list[_Event], why: str | None, used: _Event) -> _Event:
        message = {
            "id": f"msg_{self.number}",
            "type": "message",
            "role": "assistant",
            "model": self.asked.model,
            "content": content,
            "stop_reason": why,
            "stop_sequence": None,
        }
        usage = {"input_tokens": self.asked.prompt_tokens, **used}
        return message | ({"usage": usage} if self.is_counted else {})


_OF_DIALECT: Final[dict[DialectName, type[DialectAnswer]]] = {
    "completions": _Older,
    "chat": _Chat,
    "responses": _Responses,
    "messages": _Messages,
}


def answer_to(asked: Asked, number: int, created: int) -> DialectAnswer:
    return _OF_DIALECT[asked.dialect](asked, number, created)
