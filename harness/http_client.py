"""The harness's own HTTP client: TLS trust, bounded answers, reasons for failed connections."""

import errno
import os
import re
import resource
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import httpcore
import httpx

from harness.errors import ConfigError
from harness.place import Place

MOST_BYTES: Final = 1 << 25  # of one answer, headers and all
_TOO_LARGE: Final = f"the answer has more than {MOST_BYTES >> 20} MiB"
_PACKED: Final = "the answer is compressed, which the request did not allow"
_AS_IT_IS: Final = "identity"
# HTTP knows no coding `none`: servers of events say it so that no proxy compresses them.
_NO_CODINGS: Final = frozenset({"", _AS_IT_IS, "none"})
_KEPT: Final = 8  # connections, for further requests
_KEPT_S: Final = 5.0  # longer, and servers begin to close them


def why_unread(error: Exception) -> str:
    """The reason without details that vary, so that repeated failures give one warning."""
    if str(error) in (_TOO_LARGE, _PACKED):
        return str(error)
    match error:
        case httpx.HTTPStatusError():
            return f"status {error.response.status_code}"
        case httpx.ConnectError():
            return "no connection"
        case httpx.TimeoutException():
            return "no answer in time"
        case httpx.TransportError():
            return "the connection broke"
        case _:
            return "its answer is not understood"


def is_packed(coding: str) -> bool:
    """Whether a header `content-encoding` of this value means a compressed body."""
    return coding.strip().lower() not in _NO_CODINGS


class BoundedTransport(httpx.HTTPTransport):
    """Limits each answer to `MOST_BYTES`, and to `longest_s` from request to end. A request that a
    kept connection leaves without a byte of an answer, since the server has just closed it, goes
    out once more on a new one."""

    def __init__(
        self, *, verify: ssl.SSLContext, longest_s: float, place: Place | None = None
    ) -> None:
        super().__init__(verify=verify)
        self._pool.close()
        backend = _Backend(longest_s, place)
        self._pool = _pool(verify, backend, kept=_KEPT)
        self._anew = httpx.HTTPTransport(verify=verify)
        self._anew._pool.close()
        self._anew._pool = _pool(verify, backend, kept=0)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.headers["accept-encoding"] = _AS_IT_IS
        try:
            response = super().handle_request(request)
        except httpx.ReadError as error:
            if not isinstance(error.__cause__, _UnansweredError):
                raise
            response = self._anew.handle_request(request)
        if is_packed(response.headers.get("content-encoding", "")):
            response.close()
            raise httpx.DecodingError(_PACKED, request=request)
        return response

    def close(self) -> None:
        super().close()
        self._anew.close()


def _pool(
    verify: ssl.SSLContext, backend: httpcore.NetworkBackend, *, kept: int
) -> httpcore.ConnectionPool:
    # No limit on connections: a client-side one would look like the server's.
    return httpcore.ConnectionPool(
        ssl_context=verify,
        network_backend=backend,
        max_connections=None,
        max_keepalive_connections=kept,
        keepalive_expiry=_KEPT_S,
    )


class _UnansweredError(httpcore.ReadError):
    """A used connection ended without a byte of the next answer."""


class _Backend(httpcore.SyncBackend):
    def __init__(self, longest_s: float, place: Place | None) -> None:
        self._longest_s = longest_s
        self._place = place

    def connect_tcp(
        self, host: str, port: int, *args: Any, **kwargs: Any
    ) -> httpcore.NetworkStream:
        plain = super().connect_tcp

        def connect(address: str) -> httpcore.NetworkStream:
            return _Stream(plain(address, port, *args, **kwargs), self._longest_s)

        if self._place is None or host != self._place.host:
            return connect(host)
        return self._place.reach(port, connect, (httpcore.ConnectError, httpcore.ConnectTimeout))


class _Stream(httpcore.NetworkStream):
    """`_until_s`: the answer's deadline on the monotonic clock; `_size`: its bytes so far.
    `_is_used`: an answer has been read before this request."""

    def __init__(self, inner: httpcore.NetworkStream, longest_s: float) -> None:
        self._inner = inner
        self._longest_s = longest_s
        self._until_s = time.perf_counter() + longest_s
        self._size = 0
        self._is_used = False

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._is_used = self._is_used or self._size > 0
        self._size = 0
        try:
            self._inner.write(buffer, timeout)
        finally:
            self._until_s = time.perf_counter() + self._longest_s

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        left_s = self._until_s - time.perf_counter()
        if left_s <= 0:
            raise httpcore.ReadTimeout(f"the answer was not complete after {self._longest_s:g} s")
        try:
            data = self._inner.read(max_bytes, left_s if timeout is None else min(timeout, left_s))
        except httpcore.ReadError as error:
            if self._is_used and not self._size:
                raise _UnansweredError(str(error)) from error
            raise
        if not data and self._is_used and not self._size:
            raise _UnansweredError("the server closed the connection")
        self._size += len(data)
        if self._size > MOST_BYTES:
            raise httpcore.ReadError(_TOO_LARGE)
        return data

    def close(self) -> None:
        self._inner.close()

    def start_tls(self, *args: Any, **kwargs: Any) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(*args, **kwargs), self._longest_s)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


_NO_HANDLE: Final = (errno.EMFILE, errno.ENFILE)
# OpenSSL's X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH.
_FOR_ANOTHER: Final = (62, 64)
# OpenSSL's reasons if the peer's first bytes are not TLS.
_NOT_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})


def tls_context(ca_file: str | None, *, flag: str = "--ca-file") -> ssl.SSLContext:
    """Trust the CAs in this PEM file, else those of httpx: SSL_CERT_FILE, SSL_CERT_DIR, or certifi.
    Raises ConfigError, which names `flag`, for a bad file."""
    try:
        if ca_file is None:
            return httpx.create_ssl_context()
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an SSLError is one, too
        why = "has no certificate in it" if isinstance(error, ssl.SSLError) else error.strerror
        named = (
            f"{flag} {ca_file}" if ca_file else f"SSL_CERT_FILE {os.getenv('SSL_CERT_FILE', '')}"
        )
        raise ConfigError(
            f"{named}: {why}; it must be a PEM file with the certificate of the CA that signed the "
            "server's"
        ) from error


def http_client(
    headers: Mapping[str, str],
    *,
    ca_file: str | None,
    timeout_s: float,
    longest_s: float,
    place: Place | None = None,
) -> httpx.Client:
    """A client without proxies and redirects. `timeout_s` limits the wait for the next byte,
    `longest_s` the whole answer. `place`: of the server whose name always means one address."""
    verify = tls_context(ca_file)
    transport = BoundedTransport(verify=verify, longest_s=longest_s, place=place)
    return httpx.Client(headers=headers, timeout=timeout_s, transport=transport, trust_env=False)


def why_unreached(error: BaseException, host: str, port: int) -> str:
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
            return f"no server listens at {where} (connection refused): is it running?"
        case TimeoutError() if "handshake" in str(cause):
            return f"{where} does not answer a TLS handshake: should the URL begin with http://?"
        case TimeoutError():
            return f"no connection to {where} in time: is the address right?"
        case OSError(errno=errno.EADDRNOTAVAIL):
            return f"no port of this host is left for another connection to {where}"
        case _:
            return f"no connection to {where}: {cause.strerror or cause}"


def is_out_of_handles(error: OSError) -> bool:
    """Name resolution hides this: without a handle for its files, it finds no host."""
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
                f"the certificate of {host} is for another host ({error.verify_message}): "
                "use a name that the certificate holds, or add this one to it"
            )
        return (
            f"the certificate of {host} is not trusted ({error.verify_message}): "
            "name the CA that signed it with --ca-file (in plain Locust: --walkaway-ca-file) or "
            "SSL_CERT_FILE"
        )
    if error.reason in _NOT_TLS:
        return f"{where} does not speak TLS: should the URL begin with http://?"
    return f"no TLS with {where}: {error.reason or error.strerror or error}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


_CHAT: Final = "/chat/completions"
_ROUTES: Final = (_CHAT, "/completions", "/responses", "/messages", "/models")
HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
URL_TEXT: Final = re.compile(r"[!-~]+")
HEADER_VALUE: Final = re.compile(r"[\t -~]*")


def check_target_url(
    url: str, *, flag: str = "--target", schemes: Sequence[str] = ("http", "https")
) -> str:
    parts = _split(flag, url, schemes)
    if parts.query or parts.fragment:
        raise ConfigError(f"{flag} {url}: must be the server's base URL, without ? and #")
    url = url.rstrip("/")
    path = parts.path.rstrip("/")  # a gateway's base may end in `/models`, too
    ends = {one: one if one == _CHAT else f"/v1{one}" for one in _ROUTES}
    route = next((one for one, end in ends.items() if path.endswith(end)), "")
    base = url.removesuffix(route).removesuffix("/v1")
    if route:
        raise ConfigError(
            f"{flag} {url}: is one of the server's routes: name its base URL, {base}; another "
            "route is `path` in a target's file (--engine FILE)"
        )
    return base


def check_metrics_url(url: str, *, flag: str = "--metrics-url") -> str:
    _split(flag, url)
    return url


def parse_headers(typed: Iterable[str], *, flag: str = "--header") -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in typed:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag}: must look like Name=value; one of them has no `=`")
        if not HEADER_NAME.fullmatch(name):
            raise ConfigError(
                f"{flag} {name!r}: a header's name consists of letters, digits and dashes"
            )
        _check_value(f"{flag} {name}", value)
        headers[name] = value
    return headers


def typed_command(headers: Iterable[str], *, program: str = "walkaway") -> list[str]:
    """The command line for the manifest, without the values of headers, which may be secret."""
    command = [program, *sys.argv[1:]]
    for text in headers:
        hidden = f"{text.partition('=')[0]}=***"
        command = [argument.replace(text, hidden) for argument in command]
    return command


def check_ca_file(path: str | None, *, flag: str = "--ca-file") -> str | None:
    if path is None:
        return None
    tls_context(path, flag=flag)
    return str(Path(path).resolve())


def request_headers(headers: Mapping[str, str], api_key_env: str | None) -> dict[str, str]:
    key = read_api_key(api_key_env)
    return dict(headers) if key is None else {**headers, "Authorization": f"Bearer {key}"}


def read_api_key(variable: str | None, *, flag: str = "--api-key-env") -> str | None:
    """The key in this environment variable; None without one. Raises ConfigError, which names
    `flag`, if it is not set, or empty, or no header's value."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"{flag} {variable}: this environment variable is not set; export it, or omit the flag"
        )
    _check_value(f"{flag} {variable}", key)
    return key


def _split(flag: str, url: str, schemes: Sequence[str] = ("http", "https")) -> SplitResult:
    if "@" in url.partition("//")[2].partition("/")[0]:
        raise ConfigError(
            f"{flag}: holds a user name or password, which would appear in the report; "
            f"use --api-key-env or --header instead"
        )
    try:
        httpx.URL(url)
        parts = urlsplit(url)
        has_address = bool(parts.hostname) and parts.port != 0
    except (httpx.InvalidURL, ValueError):
        parts, has_address = SplitResult("", "", "", "", ""), False
    if parts.scheme not in schemes or not has_address or not URL_TEXT.fullmatch(url):
        raise ConfigError(f"{flag} {url}: must be a URL such as {schemes[0]}://127.0.0.1:8000")
    return parts


def _check_value(flag: str, value: str) -> None:
    if not HEADER_VALUE.fullmatch(value):
        raise ConfigError(
            f"{flag}: the value must be printable ASCII characters, without line breaks"
        )
