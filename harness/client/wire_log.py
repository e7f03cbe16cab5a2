"""A log of the wire: what happened on each connection of a case, one line an event.

A client that has a log gets a tap for each request. Without one nothing is logged, and nothing is
spent. Secrets are masked wherever they stand: in heads that go out, and in what a server sends
back.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from harness.records import RequestRow, Role, Way, WireClose
from harness.store.conform_result import WireEvent
from harness.workload.abandon import RequestSpec

MASK: Final = "***"
_LONG_CHARS: Final = 6
_OPEN_HEADERS: Final = ("accept", "content-type", "user-agent")
_SHOWN_CHARS: Final = 600
_NAMES: Final = {Role.USER: "leaver", Role.CHECK: "check", Role.LONG_PROMPT: "long prompt"}
_CALLS: Final = {
    Way.FIN: "close()",
    Way.RST: "close() with SO_LINGER 0",
    Way.HALF_CLOSE: "shutdown(SHUT_WR)",
    Way.STOP_READING: "no further recv()",
    Way.VANISH: "SO_ATTACH_FILTER, drops all",
    Way.KILLED: "kill(SIGKILL)",
    Way.CANCEL: "POST to the cancel endpoint",
}
_SENT: Final = {
    WireClose.FIN: "FIN",
    WireClose.RST: "RST",
    WireClose.RST_STREAM: "RST_STREAM",
}
_FRAMES: Final = {WireClose.RST_STREAM: "cancel the stream", WireClose.END_STREAM: "END_STREAM"}
_KEPT_LINES: Final = 256  # in memory: a process that is killed loses no more


def secrets_of(headers: Mapping[str, str]) -> list[str]:
    """The values that are masked wherever they stand. A short one would also be found in figures:
    it is masked in heads alone."""
    values = [value for name, value in headers.items() if name.lower() not in _OPEN_HEADERS]
    words = [word for value in values for word in (value, value.removeprefix("Bearer "))]
    return [word for word in words if len(word) >= _LONG_CHARS]


def masked(text: str, secrets: Collection[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


class WireLog:
    """`file`: None logs nothing. `attempt` numbers the tries of a case."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        """`headers`: with their secret values, the key's included."""
        self._secrets = secrets_of(headers)
        names = "|".join(re.escape(name) for name in {"authorization", *headers})
        self._secret_lines = re.compile(rf"(?im)^({names}):[^\r\n]*")
        self._encoder = msgspec.json.Encoder()
        self._file: Path | None = None
        self._lines: list[bytes] = []
        self._attempt = 0

    def begin(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        self._file, self._attempt = file, 0

    def begin_try(self, attempt: int) -> None:
        self._attempt = attempt
        self.flush()

    def flush(self) -> None:
        lines, self._lines = self._lines, []
        if self._file is not None and lines:
            with self._file.open("ab") as file:
                file.write(b"\n".join(lines) + b"\n")

    def end(self) -> None:
        self.flush()
        self._file = None

    def tap(self, spec: RequestSpec) -> "Tap | None":
        return None if self._file is None else Tap(self, spec, self._attempt)

    def write(self, event: WireEvent) -> None:
        if event.text:
            text = self._secret_lines.sub(rf"\1: {MASK}", event.text)
            event.text = masked(text, self._secrets)[:_SHOWN_CHARS]
        if self._file is not None:
            self._lines.append(self._encoder.encode(event))
        if len(self._lines) >= _KEPT_LINES:
            self.flush()


class Tap:
    """One request's part of the log."""

    def __init__(self, log: WireLog, spec: RequestSpec, attempt: int) -> None:
        self._log = log
        name = _NAMES.get(spec.role, spec.role.value)
        self._stream = f"{name} {spec.request_id.rpartition('-')[2]}"
        self._attempt = attempt
        self._has_read = False

    def connected(self, t_ns: int) -> None:
        self._note(t_ns, "connect")

    def wrote(self, t_ns: int, data: bytes) -> None:
        self._note(t_ns, "write", bytes=len(data), text=data.decode("utf-8", "replace"))

    def head(self, t_ns: int, status: int) -> None:
        self._note(t_ns, "read", text=f"HTTP {status}")

    def read(self, t_ns: int, data: bytes, tokens: int) -> None:
        """Only the text of the first bytes is kept: a long answer would repeat itself."""
        text, self._has_read = "" if self._has_read else data.decode("utf-8", "replace"), True
        self._note(t_ns, "read", bytes=len(data), tokens=tokens, text=text)

    def left(self, t0_ns: int, way: Way, unread: int, wire_close: WireClose) -> None:
        call = _FRAMES.get(wire_close) or _CALLS.get(way, way.value)
        self._note(t0_ns, "act", call=call, unread=unread, sent=_SENT.get(wire_close, "nothing"))

    def ended(self, row: RequestRow) -> None:
        why = row.error or row.finish_reason or ""
        text = f"{row.outcome}: {why}" if why else str(row.outcome)
        t_ns = row.server_ended_ns or row.ended_ns
        self._note(t_ns, "end", tokens=row.tokens_read, text=text)

    def _note(
        self, t_ns: int, what: Literal["connect", "write", "read", "act", "end"], **more: Any
    ) -> None:
        event = WireEvent(t_ns=t_ns, attempt=self._attempt, stream=self._stream, what=what, **more)
        self._log.write(event)
