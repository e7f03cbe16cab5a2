"""However the bytes are cut on their way, over TLS too, and however their user reads just then: the
events and the end are the same. Over gevent's sockets, as in a load. (Nothing is patched here: only
gevent's own sockets wait in its hub.)
"""

from __future__ import annotations

import fcntl
import itertools
import socket
import ssl
import termios
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import gevent  # noqa: TID251
from gevent import socket as gevent_socket  # noqa: TID251
from hypothesis import given
from hypothesis import strategies as st

from harness.load.connect import Tls
from harness.load.connection import Connection
from harness.load.receiver import HubReceiver, receiver
from tests.harness.load.made_up_answers import EVERYTHING, WAYS, Reading, Seen, cut, seen_by
from tests.harness.load.test_tls import agreed

if TYPE_CHECKING:
    from tests.harness.load.conftest import Secrets

ANSWERS = st.sampled_from(list(EVERYTHING.values()))
PLACES = st.lists(st.integers(0, 4000), max_size=12)
READINGS = st.lists(st.sampled_from(WAYS), min_size=1, max_size=4)


def sent_in(pieces: Sequence[bytes], ways: Sequence[Reading], *, tls: Tls | None = None) -> Seen:
    """What a reader sees of these pieces, each a receive of its own, and then the end."""
    near, far = gevent_socket.socketpair()
    with near, far:
        sending = gevent.spawn(send_each, pieces, far, near)
        connection = Connection(near, 30.0, tls=tls)
        try:
            return seen_by(connection, itertools.cycle(ways))
        finally:
            sending.kill()
            sending.get()
            connection.close()


def send_each(pieces: Sequence[bytes], far: socket.socket, near: socket.socket) -> None:
    for piece in pieces:
        far.sendall(piece)
        while fcntl.ioctl(near.fileno(), termios.FIONREAD, bytes(4)) != bytes(4):
            gevent.idle()  # whoever reads comes first
    far.shutdown(socket.SHUT_WR)


@cache
def at_once(answer: bytes) -> Seen:
    return sent_in([answer] if answer else [], WAYS[:1])


def test_these_sockets_are_read_as_those_of_the_load() -> None:
    near, far = gevent_socket.socketpair()
    with near, far:
        made = receiver(near)
        assert isinstance(made, HubReceiver)
        made.close()


@given(ANSWERS, PLACES, READINGS)
def test_over_gevents_sockets(answer: bytes, places: list[int], ways: list[Reading]) -> None:
    assert sent_in(cut(answer, places), ways) == at_once(answer)


@given(ANSWERS, PLACES, PLACES, READINGS, st.booleans())
def test_over_tls(
    secrets: Secrets,
    answer: bytes,
    records: list[int],
    places: list[int],
    ways: list[Reading],
    says_so: bool,
) -> None:
    """Cut into records, and these cut again; the server says that it ends, or does not."""
    ours, peer = agreed(secrets)
    for piece in cut(answer, records):
        peer.end.write(piece)
    if says_so:
        try:
            peer.end.unwrap()
        except ssl.SSLWantReadError:
            """It does not wait for our own last word."""
    assert sent_in(cut(peer.sent(), places), ways, tls=ours) == at_once(answer)
