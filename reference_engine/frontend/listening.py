"""The socket that clients connect to.

Its options are those of all their connections: on Linux an accepted socket inherits them.
"""

import socket
from typing import Final

from reference_engine.frontend.http_protocol import bound_silence
from reference_engine.frontend.settings import FrontendSettings

_BACKLOG: Final = 1024


class ListenError(RuntimeError):
    """The address cannot be listened on."""


def listen(host: str, port: int, settings: FrontendSettings) -> socket.socket:
    """A listening socket, IPv4 or IPv6 as the host wants. Raises ListenError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ListenError(
            f"cannot listen on {host}, port {port}: {error}; choose another --host or --port"
        ) from error
    bound_silence(listener, settings)
    return listener
