"""A server of tokens whose every send is stamped: `python -m tools.bench.token_server JSON`.

It answers any POST with a stream of OpenAI's completion events (continuous usage, HTTP chunks), at
a set rate for each stream, for as long as its standard input is open:

    standard output:  the port, as soon as it listens; "open" when the last stream is there
    the log file:     one line an answer, {"request_id", "received_ns", "sent_ns": [one a token]}

The JSON is a `Traffic` (streaming.py) and the log file. Stamps are of CLOCK_MONOTONIC, taken right
before the send. Streams are spread over the gap between two tokens, or all aligned, as the requests
of one engine step are. Staggered, the first answers are of all lengths, so that later on answers
end evenly. One thread, one epoll; it waits with `select`, whose
time-outs are exact where epoll's are milliseconds, so a send is not late by more than a wake-up.
"""

import heapq
import json
import re
import resource
import select
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Final, TextIO

HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_REQUEST_ID: Final = re.compile(rb"x-request-id: *([^\r]+)", re.IGNORECASE)
_STDIN: Final = 0


def answer(num_tokens: int) -> list[bytes]:
    """The bytes sent for each token of an answer; with the last, also the end of the stream."""
    sends = [_chunk(_event(number, num_tokens)) for number in range(1, num_tokens + 1)]
    sends[-1] += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return sends


def _event(number: int, num_tokens: int) -> bytes:
    finish_reason = "length" if number == num_tokens else None
    event = {
        "id": "cmpl-4f1c2a9e7b3d4c58",
        "object": "text_completion",
        "created": 1764000000,
        "model": "bench",
        "choices": [
            {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish_reason}
        ],
        "usage": {"prompt_tokens": 64, "completion_tokens": number, "total_tokens": 64 + number},
    }
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@dataclass(order=True)
class Stream:
    """One connection, and the answer that it is being sent. Ordered by the next token's time."""

    due_ns: int
    number: int
    sock: socket.socket = field(compare=False)
    received: bytes = field(default=b"", compare=False)
    request_id: str = field(default="", compare=False)
    received_ns: int = field(default=0, compare=False)
    next_token: int = field(default=0, compare=False)
    sent_ns: list[int] = field(default_factory=list, compare=False)

    def take_request(self) -> bool:
        """Whether a whole request is there now; it is taken out of what was received."""
        head, separator, rest = self.received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        size = int(length[1]) if length else 0
        if not separator or len(rest) < size:
            return False
        self.received = rest[size:]
        request_id = _REQUEST_ID.search(head)
        self.request_id = request_id[1].decode() if request_id else ""
        return True


class TokenServer:
    """All streams. `_due` is a heap of the streams that are being answered."""

    def __init__(self, options: SimpleNamespace, listener: socket.socket, log: TextIO) -> None:
        self._options = options
        self._period_ns = round(1e9 / options.rate)
        self._listener = listener
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._epoll.register(_STDIN, select.EPOLLIN | select.EPOLLHUP)
        self._connections: dict[int, Stream] = {}
        self._due: list[Stream] = []
        self._sends = answer(options.tokens)
        self._num_asked = 0
        self._log = log

    def serve(self) -> None:
        """Serves until standard input ends."""
        while True:
            self._send_what_is_due()
            wait_s = None
            if self._due:
                wait_s = max(0.0, (self._due[0].due_ns - perf_counter_ns()) / 1e9)
            select.select([self._epoll.fileno()], [], [], wait_s)
            for handle, _ in self._epoll.poll(0):
                if handle == _STDIN:
                    self._end()
                    return
                if handle == self._listener.fileno():
                    self._accept()
                else:
                    self._receive(self._connections[handle])

    def _send_what_is_due(self) -> None:
        due = self._due
        while due and due[0].due_ns <= (now_ns := perf_counter_ns()):
            stream = due[0]
            stream.sent_ns.append(now_ns)
            try:
                stream.sock.send(self._sends[stream.next_token])
            except OSError:  # gone, or it takes nothing any more
                heapq.heappop(due)
                stream.sent_ns.pop()
                continue
            stream.next_token += 1
            if stream.next_token == len(self._sends):
                heapq.heappop(due)
                self._note(stream)
            else:
                stream.due_ns += self._period_ns
                heapq.heapreplace(due, stream)

    def _accept(self) -> None:
        try:
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[sock.fileno()] = Stream(0, 0, sock)
                self._epoll.register(sock, select.EPOLLIN)
        except BlockingIOError:
            return

    def _receive(self, stream: Stream) -> None:
        try:
            data = stream.sock.recv(65536)
        except OSError:
            data = b""
        stream.received += data
        if not data:
            self._forget(stream)
        elif stream.take_request():
            self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        options, now_ns = self._options, perf_counter_ns()
        slot = self._num_asked % options.streams
        is_cut = options.is_staggered and self._num_asked < options.streams
        stream.next_token = options.tokens * slot // options.streams if is_cut else 0
        self._num_asked += 1
        phase_ns = 0 if options.is_aligned else self._period_ns * slot // options.streams
        stream.number = self._num_asked
        stream.received_ns = now_ns
        stream.sent_ns = []
        earliest_ns = now_ns + round(options.first_token_s * 1e9)
        stream.due_ns = earliest_ns + (phase_ns - earliest_ns) % self._period_ns
        stream.sock.send(HEAD)
        heapq.heappush(self._due, stream)
        if self._num_asked == options.streams:
            say("open")

    def _note(self, stream: Stream) -> None:
        line = {
            "request_id": stream.request_id,
            "received_ns": stream.received_ns,
            "sent_ns": stream.sent_ns,
        }
        self._log.write(json.dumps(line) + "\n")
        stream.sent_ns = []

    def _forget(self, stream: Stream) -> None:
        if stream.sent_ns:
            self._note(stream)
        self._connections.pop(stream.sock.fileno(), None)
        stream.sock.close()

    def _end(self) -> None:
        for stream in self._connections.values():
            if stream.sent_ns:
                self._note(stream)


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main() -> None:
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with (
        socket.create_server(("127.0.0.1", 0), backlog=8192) as listener,
        Path(options.log).open("w") as log,
    ):
        listener.setblocking(False)
        say(listener.getsockname()[1])
        TokenServer(options, listener, log).serve()


if __name__ == "__main__":
    main()
