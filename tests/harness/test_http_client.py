"""URLs and headers as typed, why a server was not reached, and answers that are too much."""

import errno
import gzip
import os
import resource
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from harness.collect.scrape import fetch_page
from harness.collect.source import SourceError
from harness.errors import ConfigError
from harness.http_client import (
    check_ca_file,
    check_metrics_url,
    check_target_url,
    http_client,
    parse_headers,
    request_headers,
    split_place,
    tls_context,
    typed_command,
    why_unreached,
)
from tests.conftest import Serve


@pytest.mark.parametrize(
    ("typed", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1/", "http://127.0.0.1:8000"),
        ("https://example.org/llm", "https://example.org/llm"),
    ],
)
def test_a_base_url_may_be_typed_in_several_ways(typed: str, url: str) -> None:
    assert check_target_url(typed) == url
    assert split_place("http://[::1]:8000/v1") == ("::1", 8000)
    assert split_place("https://example.org") == ("example.org", 443)


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://127.0.0.1:99999", "127.0.0.1:8000", "ftp://x", "http://", ""]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--target .*must be a URL such as"):
        check_target_url(url)
    with pytest.raises(ConfigError, match=r"--metrics-url .*must be a URL such as"):
        check_metrics_url(url)


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="user name or password") as caught:
        check_target_url("http://me:hunter2@127.0.0.1:8000")
    assert "hunter2" not in str(caught.value)


def test_headers_are_read_and_no_value_gets_into_the_manifest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse_headers(["A=1", "X-B=c=d"]) == {"A": "1", "X-B": "c=d"}
    headers = ["X-Key=secret1", "X-Key=secret2"]
    typed = ["walkaway", "run", "demo", "--header", headers[0], f"--header={headers[1]}"]
    monkeypatch.setattr(sys, "argv", typed)
    assert typed_command(headers) == [*typed[:4], "X-Key=***", "--header=X-Key=***"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("secret", "must look like Name=value"),
        ("a b=secret", "consists of letters, digits and dashes"),
        ("X=secr\u00e9t", "must be printable ASCII"),
        ("X=secret\nY: 1", "without line breaks"),
    ],
)
def test_headers_that_cannot_be_sent_are_refused(typed: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_headers([typed])
    assert "secret" not in str(caught.value)


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALKAWAY_TEST_KEY", "secret")
    headers = request_headers({"X-A": "1"}, "WALKAWAY_TEST_KEY")
    assert headers == {"X-A": "1", "Authorization": "Bearer secret"}
    monkeypatch.delenv("WALKAWAY_TEST_KEY")
    with pytest.raises(ConfigError, match="WALKAWAY_TEST_KEY: this environment variable"):
        request_headers({}, "WALKAWAY_TEST_KEY")


NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def verification_error(
    code: int = 18, text: str = "self-signed certificate"
) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, text
    return error


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "whatever")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("error", "host", "words"),
    [
        (NO_NAME, "h", "no host h (Name"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "::1", "no server listens at [::1]:9"),
        (verification_error(), "h", "of h is not trusted (self-signed certificate): name the CA"),
        (verification_error(62, "wrong name"), "h", "is for another host (wrong name): use a"),
        (
            verification_error(64, "IP mismatch"),
            "::1",
            "::1 is for another host (IP mismatch): use",
        ),
        (tls_error("WRONG_VERSION_NUMBER"), "h", "h:9 does not speak TLS: should the URL begin"),
        (tls_error("TLSV1_ALERT_INTERNAL_ERROR"), "h", "no TLS with h:9: TLSV1_ALERT_INTERNAL"),
        (OSError(errno.EMFILE, "Too many open files"), "h", "no file handle is left, of "),
        (OSError(errno.EADDRNOTAVAIL, "x"), "h", "no port of this host is left"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "h", "h:9: Network is unreachable"),
        (TimeoutError("_ssl.c:9: The handshake operation timed out"), "h", "h:9 does not answer a"),
        (TimeoutError("timed out"), "h", "no connection to h:9 in time"),
        (UnicodeError("label too long"), "h", "label too long"),
    ],
)
def test_words(error: Exception, host: str, words: str) -> None:
    assert words in why_unreached(error, host, 9)
    wrapped = httpx.ConnectError("all connection attempts failed")
    wrapped.__cause__ = httpx.ConnectError("the same")
    wrapped.__cause__.__cause__ = error
    if isinstance(error, OSError):
        assert words in why_unreached(wrapped, host, 9)


def test_a_name_is_not_blamed_where_no_handle_is_left() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.open("/dev/null", os.O_RDONLY)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        why = why_unreached(NO_NAME, "h", 9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert why == f"no file handle is left, of {probe}: use fewer users, or raise `ulimit -n`"


def test_a_ca_file_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    with pytest.raises(ConfigError, match=r"--ca-file .*absent.pem: No such file.*PEM file"):
        check_ca_file(str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match=r"--ca-file .*empty.pem: has no certificate in it"):
        check_ca_file(str(empty))
    monkeypatch.setenv("SSL_CERT_FILE", str(empty))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE .*empty.pem: has no certificate"):
        http_client({}, ca_file=None, timeout_s=1.0, longest_s=1.0)


def test_without_a_ca_file_the_usual_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert check_ca_file(None) is None
    assert tls_context(None).get_ca_certs()


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The URL of a server that answers one connection by this, and is then over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as sock:
                answer(sock)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("drop", [b"y", b""], ids=["in drops", "silent"])
def test_an_answer_without_end_is_given_up(drop: bytes) -> None:
    """Each byte would be in time for the next; the whole is not."""

    def drip(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nx: ")
        assert sock.recv(4096)
        for _ in range(1000):
            if select.select([sock], [], [], 0.01)[0]:
                return  # the client has left
            sock.sendall(drop)

    with (
        answering(drip) as url,
        http_client({}, ca_file=None, timeout_s=30.0, longest_s=0.3) as client,
        pytest.raises(httpx.ReadTimeout),
    ):
        client.get(url)


def pour(sock: socket.socket) -> None:
    """Bytes without end."""
    sock.recv(4096)
    with suppress(OSError):
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sock.sendall(bytes(1 << 20))


def pack(sock: socket.socket) -> None:
    """An answer a thousand times as large as it came, which was not asked for."""
    assert b"accept-encoding: identity\r\n" in sock.recv(4096).lower()
    packed = gzip.compress(bytes(1 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    sock.sendall(head % len(packed) + packed)


@pytest.mark.parametrize(
    ("answer", "why"),
    [(pour, r"\(.* more than 32 MiB\)"), (pack, r"\(the answer is compressed, which")],
)
def test_an_answer_that_takes_too_much_memory_is_given_up(
    answer: Callable[[socket.socket], None], why: str
) -> None:
    with (
        answering(answer) as url,
        http_client({}, ca_file=None, timeout_s=30.0, longest_s=60.0) as client,
        pytest.raises(SourceError, match=rf"/metrics could not be read {why}"),
    ):
        fetch_page(client, f"{url}/metrics")


def test_more_than_a_hundred_requests_run_at_once(serve: Serve) -> None:
    """They wait for each other: with fewer connections, none would be answered."""
    together = threading.Barrier(120, timeout=60)
    url = serve(lambda _: (200, {}, str(together.wait()).encode()))
    with (
        http_client({}, ca_file=None, timeout_s=60, longest_s=60) as client,
        ThreadPoolExecutor(max_workers=120) as threads,
    ):
        answers = list(threads.map(client.get, [url] * 120))
    assert {one.text for one in answers} == {str(number) for number in range(120)}
