"""What tools/truth/faulty_gateway.py reads of the answers that it passes on, and bills for them.

It shares no code with the harness. A token of a prompt is a word between blanks, as the bundled
upstream counts them.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

DIALECTS: Final = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
}
ENDS: Final = {
    "responses": b"event: response.completed\n"
    b'data: {"type":"response.completed","response":{"status":"completed"}}\n\n',
    "messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}
DONE: Final = b"data: [DONE]\n\n"
INNER: Final = ("response", "message")  # where an event may hold the id and the usage
PROMPTS: Final = ("system", "instructions", "prompt", "messages", "input")


def dialect_of(path: str) -> str | None:
    return next((name for ending, name in DIALECTS.items() if path.endswith(ending)), None)


def clean_end(dialect: str) -> bytes:
    return ENDS.get(dialect, DONE)


def error_event(dialect: str, message: str) -> bytes:
    is_named = dialect in ENDS
    return (b"event: error\n" if is_named else b"") + b"data: " + error(message) + b"\n\n"


def error(message: str) -> bytes:
    body = {"type": "error", "error": {"type": "api_error", "message": message}}
    return json.dumps(body).encode()


def prompt_tokens(asked: dict[str, Any]) -> int:
    return sum(len(text.split()) for key in PROMPTS for text in _texts(asked.get(key)))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        yield from _texts([value.get("content"), value.get("text")])


class Meter:
    """Reads an answer. `tokens`: its events with text; `usage`: what it says at its end, of prompt
    and answer; `name`: its id."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.prompt = prompt_tokens(asked)
        self.tokens = 0
        self.usage: tuple[int, int] | None = None
        self.name: str | None = None
        self._rest = b""

    def read(self, piece: bytes) -> None:
        """Reads a piece of a stream."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(json.loads(line[6:]))

    def read_whole(self, body: bytes) -> None:
        whole = json.loads(body)
        self.name = whole.get("id")
        self._use(whole.get("usage"))

    def _event(self, event: dict[str, Any]) -> None:
        inner = next((event[key] for key in INNER if isinstance(event.get(key), dict)), event)
        self.name = self.name or inner.get("id")
        if _has_text(event):
            self.tokens += 1
        elif event.get("type") != "message_start":  # which counts what is still to come
            self._use(inner.get("usage"))

    def _use(self, usage: dict[str, int] | None) -> None:
        if usage:
            made = usage.get("completion_tokens", usage.get("output_tokens", 0))
            prompt = usage.get("prompt_tokens", usage.get("input_tokens", self.prompt))
            self.usage = prompt, made


def _has_text(event: dict[str, Any]) -> bool:
    match event:
        case {"choices": [{"text": text}]} | {"choices": [{"delta": {"content": text}}]}:
            return bool(text)
        case {"type": "response.output_text.delta"} | {"type": "content_block_delta"}:
            return True
        case _:
            return False
