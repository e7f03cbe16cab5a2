"""Reaching a server: whom to trust over TLS, and in plain words why it was not reached."""

import errno
import os
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httpcore
import httpx

from harness.errors import ConfigError

MOST_BYTES: Final = 1 << 25  # of one answer, headers and all
_TOO_LARGE: Final = f"the answer has more than {MOST_BYTES >> 20} MiB"
_PACKED: Final = "the answer is packed, though nobody asked for that"
_AS_IT_IS: Final = "identity"
_KEPT: Final = 8  # connections, for further requests
_KEPT_S: Final = 5.0  # longer, and servers begin to close them


def why_unread(error: Exception) -> str:
    """Why an answer could not be read, in words that do not change from time to time."""
    return str(error) if str(error) in (_TOO_LARGE, _PACKED) else type(error).__name__


class BoundedTransport(httpx.HTTPTransport):
    """`longest_s`: from the sending of a request to the end of its answer."""

    def __init__(self, *, verify: ssl.SSLContext, longest_s: float) -> None:
        super().__init__(verify=verify)
        self._pool.close()
        # As many at once as are asked for: a limit of ours would look like one of the server's.
        self._pool = httpcore.ConnectionPool(
            ssl_context=verify,
            network_backend=_Backend(longest_s),
            max_connections=None,
            max_keepalive_connections=_KEPT,
            keepalive_expiry=_KEPT_S,
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = _AS_IT_IS
        response = super().handle_request(request)
        if response.headers.get("content-encoding", _AS_IT_IS) != _AS_IT_IS:
            response.close()
            raise httpx.DecodingError(_PACKED, request=request)
        return response


class _Backend(httpcore.NetworkBackend):
    def __init__(self, longest_s: float) -> None:
        self._inner = httpcore.SyncBackend()
        self._longest_s = longest_s

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = self._inner.connect_tcp(host, port, timeout, local_address, socket_options)
        return _Stream(stream, self._longest_s)


class _Stream(httpcore.NetworkStream):
    """Its state: `_until_s`, when the answer must be complete, on the monotonic clock, and `_size`,
    the bytes of it that have come."""

    def __init__(self, inner: httpcore.NetworkStream, longest_s: float) -> None:
        self._inner = inner
        self._longest_s = longest_s
        self._until_s = time.perf_counter() + longest_s
        self._size = 0

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, timeout)
        self._until_s = time.perf_counter() + self._longest_s
        self._size = 0

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left_s = self._until_s - time.perf_counter()
        if left_s <= 0:
            raise httpcore.ReadTimeout(f"the answer was not complete after {self._longest_s:g} s")
        data = self._inner.read(max_bytes, left_s if timeout is None else min(timeout, left_s))
        self._size += len(data)
        if self._size > MOST_BYTES:
            raise httpcore.ReadError(_TOO_LARGE)
        return data

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._inner.start_tls(ssl_context, server_hostname, timeout), self._longest_s
        )

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


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
    """Why a server was not reached, and what to do, from `error` and its causes."""
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
    """Did it fail because this process, or the system, has no file handle left?

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


HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


URL_TEXT: Final = re.compile(r"[!-~]+")


HEADER_VALUE: Final = re.compile(r"[\t -~]*")


def check_target_url(url: str, *, flag: str = "--target") -> str:
    """The base URL without a slash at its end. Raises ConfigError, in which `flag` says where it
    was typed."""
    parts = _split(flag, url)
    if parts.query or parts.fragment:
        raise ConfigError(f"{flag} {url}: must be the server's base URL, without ? and #")
    return url.rstrip("/").removesuffix("/v1")


def check_metrics_url(url: str) -> str:
    """The URL of a metrics page, as it was typed. Raises ConfigError."""
    _split("--metrics-url", url)
    return url


def parse_headers(typed: Iterable[str], *, flag: str = "--header") -> dict[str, str]:
    """The headers of several `--header Name=value`. Raises ConfigError."""
    headers: dict[str, str] = {}
    for text in typed:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag}: must look like Name=value; there is no `=` in one of them")
        if not HEADER_NAME.fullmatch(name):
            raise ConfigError(
                f"{flag} {name!r}: a header's name is made of letters, digits and dashes"
            )
        _check_value(f"{flag} {name}", value)
        headers[name] = value
    return headers


def typed_command(headers: Iterable[str], *, program: str = "walkaway") -> list[str]:
    """The command line for the manifest, without the values of headers: they may be secret."""
    hidden = {text: f"{text.partition('=')[0]}=***" for text in headers}
    return [program, *(_hide(argument, hidden) for argument in sys.argv[1:])]


def _hide(argument: str, hidden: dict[str, str]) -> str:
    for secret, shown in hidden.items():
        argument = argument.replace(secret, shown)
    return argument


def check_ca_file(path: str | None, *, flag: str = "--ca-file") -> str | None:
    """Where it lies, for a process in any folder. Raises ConfigError where it is none."""
    if path is None:
        return None
    tls_context(path, flag=flag)
    return str(Path(path).resolve())


def request_headers(headers: Mapping[str, str], api_key_env: str | None) -> dict[str, str]:
    """The headers for the harness's own requests. Raises ConfigError where the key is not set."""
    if api_key_env is None:
        return dict(headers)
    key = os.environ.get(api_key_env)
    if not key:
        raise ConfigError(
            f"--api-key-env {api_key_env}: this environment variable is not set; "
            f"export it, or leave the flag out"
        )
    _check_value(f"--api-key-env {api_key_env}", key)
    return {**headers, "Authorization": f"Bearer {key}"}


def _split(flag: str, url: str) -> SplitResult:
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ConfigError(
            f"{flag}: holds a user name or password, which would stand in the report; "
            f"give it with --api-key-env or --header instead"
        )
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        has_address = bool(parts.hostname) and parts.port != 0
    except (httpx.InvalidURL, ValueError):
        parts, has_address = SplitResult("", "", "", "", ""), False
    if parts.scheme not in ("http", "https") or not has_address or not URL_TEXT.fullmatch(url):
        raise ConfigError(f"{flag} {url}: must be a URL such as http://127.0.0.1:8000")
    return parts


def _check_value(flag: str, value: str) -> None:
    if not HEADER_VALUE.fullmatch(value):
        raise ConfigError(
            f"{flag}: the value must be printable ASCII characters, without line breaks"
        )
