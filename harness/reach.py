"""Reaching a server: whom to trust over TLS, and in plain words why it was not reached."""

import errno
import os
import resource
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import urlsplit

import httpx

from harness.bounded_http import BoundedTransport
from harness.errors import ConfigError

_NO_HANDLE: Final = (errno.EMFILE, errno.ENFILE)
# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_FOR_ANOTHER: Final = (62, 64)
# What OpenSSL says when the other side's first bytes are no TLS.
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})


def tls_context(ca_file: str | None, *, flag: str = "--ca-file") -> ssl.SSLContext:
    """Whom to trust: the CAs in this PEM file, else those that httpx trusts.

    Without a file the environment decides as in httpx: SSL_CERT_FILE, SSL_CERT_DIR, else certifi's.
    Raises ConfigError for a file that is none, and names the `flag` that it came with.
    """
    try:
        if ca_file is None:
            return httpx.create_ssl_context()
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an SSLError is one, too
        why = "has no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(
            f"{_named(ca_file, flag)}: {why}; it must be a PEM file with the certificate of the CA "
            "that signed the server's"
        ) from error


def http_client(
    headers: Mapping[str, str], *, ca_file: str | None, timeout_s: float, longest_s: float
) -> httpx.Client:
    """For the harness's own requests: no proxies, no redirects, the same trust as the load's.

    `timeout_s` is for the next byte, `longest_s` for the whole answer.
    """
    transport = BoundedTransport(verify=tls_context(ca_file), longest_s=longest_s)
    return httpx.Client(headers=headers, timeout=timeout_s, transport=transport, trust_env=False)


def split_place(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def why_unreached(error: BaseException, host: str, port: int) -> str:
    """What kept us from a server, and what to do; `error` or what it was raised from tells."""
    cause = next((one for one in _chain(error) if isinstance(one, OSError)), None)
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    match cause:
        case None:
            return str(error) or type(error).__name__
        case OSError() if is_out_of_handles(cause):
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"no file handle is left, of {most}: use fewer users, or raise `ulimit -n`"
        case socket.gaierror():
            return f"there is no host {host} ({cause.strerror}): is its name right?"
        case ssl.SSLError():
            return _why_no_tls(cause, host, where)
        case ConnectionRefusedError():
            return f"nobody listens at {where} (connection refused): is the server running?"
        case TimeoutError() if "handshake" in str(cause):
            return f"{where} takes no part in a TLS handshake: should the URL begin with http://?"
        case TimeoutError():
            return f"no connection to {where} in time: is the address right?"
        case OSError(errno=errno.EADDRNOTAVAIL):
            return f"no port of this host is left for another connection to {where}"
        case _:
            return f"no connection to {where}: {cause.strerror or cause}"


def is_out_of_handles(error: OSError) -> bool:
    """Whether it failed because this process, or the system, has no file handle left.

    Name resolution does not tell: without a handle to read its files with, no host has a name.
    """
    if isinstance(error, socket.gaierror):
        try:
            socket.socket().close()
        except OSError as why:
            return why.errno in _NO_HANDLE
    return error.errno in _NO_HANDLE


def _why_no_tls(error: ssl.SSLError, host: str, where: str) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _FOR_ANOTHER:
            return (
                f"the certificate of {host} is another's ({error.verify_message}): "
                "ask by a name that is in the certificate, or have this one added to it"
            )
        return (
            f"the certificate of {host} is not trusted ({error.verify_message}): "
            "name the CA that signed it with --ca-file (of plain Locust: --walkaway-ca-file) or "
            "SSL_CERT_FILE"
        )
    if error.reason in _NOT_TLS:
        return f"{where} does not speak TLS: should the URL begin with http://?"
    return f"no TLS with {where}: {error.reason or error.strerror or error}"


def _named(ca_file: str | None, flag: str) -> str:
    if ca_file is not None:
        return f"{flag} {ca_file}"
    return f"SSL_CERT_FILE {os.environ.get('SSL_CERT_FILE', '')}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__
