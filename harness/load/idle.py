"""Connections that have carried a whole answer and wait for the next request."""

from collections import defaultdict

from harness.load.dial import Origin, Wire


class IdleWires:
    """What is open and unused. There are never more than requests were once under way together."""

    def __init__(self) -> None:
        self._idle: defaultdict[Origin, list[Wire]] = defaultdict(list)

    def put(self, origin: Origin, wire: Wire) -> None:
        """Keep a connection on which nothing is expected any more."""
        self._idle[origin].append(wire)

    def take(self, origin: Origin) -> Wire | None:
        """The one that was used last; those on which the server has since spoken, most likely to
        hang up, are closed."""
        while wires := self._idle[origin]:
            wire = wires.pop()
            if not wire.has_input():
                return wire
            wire.sock.close()
        return None

    def close(self) -> None:
        """Close them all."""
        for wires in self._idle.values():
            for wire in wires:
                wire.sock.close()
        self._idle.clear()
