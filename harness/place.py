"""Where a server is, and whether it may be loaded."""

import contextlib
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import Final, TypeVar
from urllib.parse import urlsplit

import psutil

from harness.errors import ConfigError

LOAD_THIS_HOST: Final = "--yes-load-this-host"
_Errors = tuple[type[Exception], ...]
Made = TypeVar("Made")


class Place:
    """Where a server is, and its one `address`: the name is looked up once, and the first address
    that accepts a connection is the server's from then on. Another port of the name, such as that
    of a metrics page, is asked at this address first. `address`: if it was found before."""

    def __init__(self, url: str, address: str | None = None) -> None:
        self.host, self.port = split_place(url)
        self.addresses = look_up(url) if address is None else [address]
        self.address = self.host if self.addresses == [self.host] else address

    def reach(self, port: int, connect: Callable[[str], Made], errors: _Errors) -> Made:
        """What `connect` makes of the first address for which it raises none of these errors; it
        gets the name where no address is known, and says so itself."""
        to_try = [one for one in self.addresses if one != self.address] or [self.host]
        if self.address is not None:
            to_try = [self.address] if port == self.port else [self.address, *to_try]
        for address in to_try[:-1]:
            with contextlib.suppress(*errors):
                return self._noted(address, port, connect(address))
        return self._noted(to_try[-1], port, connect(to_try[-1]))

    def _noted(self, address: str, port: int, made: Made) -> Made:
        if port == self.port:
            self.address = address
        return made


def check_host(url: str, *, is_allowed: bool) -> Place:
    """Raises ConfigError for a host that is not loopback, unless the flag allowed it."""
    place = Place(url)
    address = next((one for one in place.addresses if not ip_address(one).is_loopback), None)
    if address is not None and not is_allowed:
        named = address if place.host == address else f"{place.host} ({address})"
        raise ConfigError(
            f"{url}: {named} is not loopback: a load can disturb other users of that server; add "
            f"{LOAD_THIS_HOST} if it is yours to load"
        )
    return place


def split_place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def look_up(url: str) -> list[str]:
    """The addresses of the URL's host, in the system's order. An empty list for a name
    without any: the connection then says that."""
    try:
        found = socket.getaddrinfo(*split_place(url), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def address_elsewhere(url: str) -> str | None:
    """An address of the URL's host that is not loopback."""
    return next((one for one in look_up(url) if not ip_address(one).is_loopback), None)


def is_here(url: str) -> bool:
    """Whether the URL is of this machine, by the addresses of its interfaces."""
    own = {one.address for several in psutil.net_if_addrs().values() for one in several}
    return any(address in own for address in look_up(url))
