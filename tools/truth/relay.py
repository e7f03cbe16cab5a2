"""An independent reader of the wire: `python -m tools.truth.relay PORT`.

It stands between clients and the server at PORT, hands on bytes, FIN and RST, and reports each
client's leaving in a line of JSON: `id` (of the order in the prompt), `how`, `t_ns` (its clock as
soon as it has read the leaving, before it hands that on), and `tokens`, the words of the answer
that were on the wire. It shares no code with the harness, and ends with its standard input.
"""

import json
import re
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress

ID = re.compile(rb"\[walkaway id=([\w-]+)")
TOKEN = b'"text":" w'
RESET = struct.pack("ii", 1, 0)
READ_BYTES = 1 << 16


class Pair:
    """A client's connection and its own to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.asked, self.answered = b"", b""
        self.how, self.t_ns = "", 0

    def report(self) -> None:
        found = ID.search(self.asked)
        if self.how and found is not None:
            tokens = self.answered.count(TOKEN)
            row = {"id": found[1].decode(), "how": self.how, "t_ns": self.t_ns, "tokens": tokens}
            print(json.dumps(row), flush=True)  # noqa: T201


class Relay:
    def __init__(self, port: int) -> None:
        self._port = port
        self._ready = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._pairs: dict[socket.socket, Pair] = {}
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._ready.register(sys.stdin, selectors.EVENT_READ)
        address = {"event": "ready", "port": self._listener.getsockname()[1]}
        print(json.dumps(address), flush=True)  # noqa: T201

    def run(self) -> None:
        while True:
            for key, _ in self._ready.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        pair = Pair(client, server)
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = pair
            self._ready.register(one, selectors.EVENT_READ)

    def _read(self, one: socket.socket) -> None:
        if (pair := self._pairs.get(one)) is None:
            return  # it was closed by an event before this one
        try:
            data = one.recv(READ_BYTES)
            now_ns = time.perf_counter_ns()
        except ConnectionResetError:
            data, now_ns = None, time.perf_counter_ns()
        if one is pair.client:
            self._from_client(pair, data, now_ns)
        elif data:
            pair.answered += data
            with suppress(ConnectionError):
                pair.client.sendall(data)
        else:
            self._end(pair)

    def _from_client(self, pair: Pair, data: bytes | None, now_ns: int) -> None:
        if data:
            pair.asked += data
            pair.server.sendall(data)
            return
        pair.how, pair.t_ns = ("rst" if data is None else "fin"), now_ns
        if data is None:
            with suppress(BlockingIOError):  # a reset takes with it what nobody has read
                pair.answered += pair.server.recv(READ_BYTES, socket.MSG_DONTWAIT)
            pair.server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._end(pair)
        else:  # what is still on its way is read to its end
            self._ready.unregister(pair.client)
            del self._pairs[pair.client]
            with suppress(OSError):
                pair.server.shutdown(socket.SHUT_WR)

    def _end(self, pair: Pair) -> None:
        for one in (pair.client, pair.server):
            if self._pairs.pop(one, None) is not None:
                self._ready.unregister(one)
            one.close()
        pair.report()


if __name__ == "__main__":
    Relay(int(sys.argv[1])).run()
