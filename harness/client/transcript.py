"""A session in words: the messages that a turn sends, from the parts of its context.

A server that keeps responses gets the messages after its newest whole response, and that response's
id. What was read of a stopped answer is not the server's response: it is sent.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from harness.records import Outcome, RequestRow
from harness.workload.abandon import RequestSpec
from harness.workload.session import ChatMessage, Said, Speaker

_BETWEEN: Final = "\n\n"  # two texts of one role: many servers refuse two such messages in a row
_FORGOTTEN: Final = (400, 404)


class Transcript:
    """The transcript of the session that a user is in. `_stored`: the server's newest whole
    response, and the number of its request."""

    def __init__(self, *, server_keeps: bool) -> None:
        self._server_keeps = server_keeps
        self._system = ""
        self._texts: dict[tuple[int, Speaker], str] = {}
        self._stored: tuple[str, int] | None = None

    def begin(self, system: str) -> None:
        self._system, self._stored = system, None
        self._texts.clear()

    def ask(self, spec: RequestSpec, text: str) -> tuple[RequestSpec, str]:
        """The turn with the messages before its prompt, and the prompt."""
        turn = spec.turn
        assert turn is not None
        self._texts[turn.n, "user"] = text
        if turn.cut_tokens:
            self._stored = None
        response_id, newest = self._stored or (None, -1)
        system = [] if response_id or not self._system else [ChatMessage("system", self._system)]
        said = (one for one in turn.earlier if one.n > newest)
        *messages, prompt = _joined([*system, *self._messages(said), ChatMessage("user", text)])
        return replace(spec, messages=messages, response_id=response_id), prompt.text

    def answered(
        self, spec: RequestSpec, row: RequestRow, text: str, response_id: str | None
    ) -> None:
        assert spec.turn is not None
        self._texts[spec.turn.n, "assistant"] = text
        if self._server_keeps and response_id and row.outcome is Outcome.COMPLETED:
            self._stored = response_id, spec.turn.n

    def is_forgotten(self, spec: RequestSpec, row: RequestRow) -> bool:
        """The server refused a response's id: from now on the whole context is sent."""
        if spec.response_id is None or row.status_code not in _FORGOTTEN:
            return False
        self._stored = None
        return True

    def _messages(self, said: Iterable[Said]) -> Iterable[ChatMessage]:
        for one in said:
            text = self._texts.get((one.n, one.by), "")
            if text:
                yield ChatMessage(one.by, text)


def _joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    joined: list[ChatMessage] = []
    for one in messages:
        if joined and joined[-1].role == one.role:
            one = ChatMessage(one.role, f"{joined.pop().text}{_BETWEEN}{one.text}")
        joined.append(one)
    return joined
