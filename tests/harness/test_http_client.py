"""Clients of HTTP: flags as they were typed, why a server was not reached, answers without end."""

import contextlib
import errno
import gzip
import itertools
import os
import re
import resource
import select
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
    read_api_key,
    request_headers,
    tls_context,
    typed_command,
    why_unreached,
)
from harness.place import Place, check_host, is_here, split_place
from tests.conftest import ServePages
from tests.harness.client.asking import limited, listening


def test_a_base_url_may_be_typed_in_several_ways() -> None:
    assert check_target_url("http://127.0.0.1:8000/v1/") == "http://127.0.0.1:8000"
    assert check_target_url("https://example.org/llm") == "https://example.org/llm"
    with pytest.raises(ConfigError, match="name its base URL, http://h/llm; another route"):
        check_target_url("http://h/llm/v1/chat/completions/")


@pytest.mark.parametrize("url", ["http://[::1", "http://h:99999", "127.0.0.1:8000", "ftp://x", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--target .*must be a URL such as"):
        check_target_url(url)
    with pytest.raises(ConfigError, match=r"--metrics-url .*must be a URL such as"):
        check_metrics_url(url)


def test_a_url_with_a_password_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigError, match="user name or password") as caught:
        check_target_url("http://me:hunter2@127.0.0.1:8000")
    assert "hunter2" not in str(caught.value)


def test_headers_are_read_or_refused_without_repeating_them() -> None:
    assert parse_headers(["A=1", "X-B=c=d"]) == {"A": "1", "X-B": "c=d"}
    for typed, message in (
        ("secret", "must look like Name=value"),
        ("a b=secret", "consists of letters, digits and dashes"),
        ("X=secr\u00e9t", "must be printable ASCII"),
        ("X=secret\nY: 1", "without line breaks"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            parse_headers([typed])
        assert "secret" not in str(caught.value)


def test_no_header_value_gets_into_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = ["X-Key=secret1", "X-Key=secret2"]
    typed = ["walkaway", "run", "demo", "--header", headers[0], f"--header={headers[1]}"]
    monkeypatch.setattr(sys, "argv", typed)
    assert typed_command(headers) == [*typed[:4], "X-Key=***", "--header=X-Key=***"]


def test_the_api_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WALKAWAY_TEST_KEY", "secret")
    headers = request_headers({"X-A": "1"}, "WALKAWAY_TEST_KEY")
    assert headers == {"X-A": "1", "Authorization": "Bearer secret"}
    for wrong, why in (("", "this environment variable"), ("schlüssel", "the value must be")):
        monkeypatch.setenv("WALKAWAY_TEST_KEY", wrong)
        with pytest.raises(ConfigError, match=f"^--api-key-env WALKAWAY_TEST_KEY: {why}"):
            request_headers({}, "WALKAWAY_TEST_KEY")
        with pytest.raises(ConfigError, match=f"^--walkaway-api-key-env WALKAWAY_TEST_KEY: {why}"):
            read_api_key("WALKAWAY_TEST_KEY", flag="--walkaway-api-key-env")


def untrusted(code: int, text: str) -> ssl.SSLCertVerificationError:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_code, error.verify_message = code, text
    return error


def tls_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, "whatever")
    error.reason = reason
    return error


NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
LATE_HANDSHAKE = TimeoutError("_ssl.c:9: The handshake operation timed out")


@pytest.mark.parametrize(
    ("error", "host", "words"),
    [
        (NO_NAME, "h", "no host h (Name"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "no"), "::1", "no server listens at [::1]:9"),
        (untrusted(18, "self-signed"), "h", "of h is not trusted (self-signed): name the CA"),
        (untrusted(62, "mismatch"), "h", "is for another host (mismatch): use a"),
        (untrusted(64, "mismatch"), "::1", "::1 is for another host (mismatch): use"),
        (tls_error("WRONG_VERSION_NUMBER"), "h", "h:9 does not speak TLS: should the URL begin"),
        (tls_error("TLSV1_ALERT_INTERNAL_ERROR"), "h", "no TLS with h:9: TLSV1_ALERT_INTERNAL"),
        (OSError(errno.EMFILE, "Too many open files"), "h", "no file handle is left, of "),
        (OSError(errno.EADDRNOTAVAIL, "x"), "h", "no port of this host is left"),
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "h", "h:9: Network is unreachable"),
        (LATE_HANDSHAKE, "h", "h:9 does not answer a"),
        (TimeoutError("timed out"), "h", "no connection to h:9 in time"),
        (UnicodeError("label too long"), "h", "label too long"),
    ],
)
def test_why_a_server_was_not_reached(error: Exception, host: str, words: str) -> None:
    assert words in why_unreached(error, host, 9)
    wrapped = httpx.ConnectError("all connection attempts failed")
    wrapped.__cause__ = httpx.ConnectError("the same")
    wrapped.__cause__.__cause__ = error
    if isinstance(error, OSError):
        assert words in why_unreached(wrapped, host, 9)


def test_a_name_is_not_blamed_where_no_handle_is_left() -> None:
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with limited(resource.RLIMIT_NOFILE, lowest_free):
        why = why_unreached(NO_NAME, "h", 9)
    assert why == f"no file handle is left, of {lowest_free}: use fewer users, or raise `ulimit -n`"


def test_places() -> None:
    assert split_place("http://[::1]:8000/v1") == ("::1", 8000)
    assert split_place("https://example.org") == ("example.org", 443)


def test_the_usual_cas_are_trusted_or_those_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert check_ca_file(None) is None
    assert tls_context(None).get_ca_certs()
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    with pytest.raises(ConfigError, match=r"--ca-file .*absent.pem: No such file.*PEM file"):
        check_ca_file(str(tmp_path / "absent.pem"))
    with pytest.raises(ConfigError, match=r"--ca-file .*empty.pem: has no certificate in it"):
        check_ca_file(str(empty))
    monkeypatch.setenv("SSL_CERT_FILE", str(empty))
    with pytest.raises(ConfigError, match=r"SSL_CERT_FILE .*empty.pem: has no certificate"):
        http_client({}, ca_file=None, timeout_s=1.0, longest_s=1.0)


def _drip(sock: socket.socket) -> None:
    """Each byte is in time for the next; the whole is not."""
    sock.sendall(b"HTTP/1.1 200 OK\r\nx: ")
    while not select.select([sock], [], [], 0.01)[0]:
        sock.sendall(b"y")


def _pour(sock: socket.socket) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        sock.sendall(bytes(1 << 20))


def _pack(sock: socket.socket) -> None:
    """Unpacked, it would be a thousand times as large."""
    packed = gzip.compress(bytes(1 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
    sock.sendall(head % len(packed) + packed)


@pytest.mark.parametrize("coding", ["none", "Identity", ""])
def test_an_answer_that_names_no_coding_is_read(coding: str) -> None:
    def speak(sock: socket.socket) -> None:
        sock.recv(4096)
        head = f"HTTP/1.1 200 OK\r\ncontent-encoding: {coding}\r\ncontent-length: 2\r\n\r\n"
        sock.sendall(head.encode() + b"hi")

    with (
        listening(speak) as place,
        http_client({}, ca_file=None, timeout_s=30.0, longest_s=30.0) as client,
    ):
        assert fetch_page(client, f"http://{place}/metrics").text == "hi"


@pytest.mark.parametrize(
    ("answer", "longest_s", "why"),
    [
        (_drip, 0.3, "no answer in time"),
        (lambda sock: select.select([sock], [], [], 30), 0.3, "no answer in time"),
        (_pour, 60.0, "more than 32 MiB"),
        (_pack, 30.0, "the answer is compressed, which"),
    ],
    ids=["in drops", "silent", "too large", "compressed"],
)
def test_an_answer_is_given_up(
    answer: Callable[[socket.socket], None], longest_s: float, why: str
) -> None:
    asked: list[bytes] = []

    def speak(sock: socket.socket) -> None:
        asked.append(sock.recv(4096))
        answer(sock)

    with (
        listening(speak) as place,
        http_client({}, ca_file=None, timeout_s=30.0, longest_s=longest_s) as client,
        pytest.raises(SourceError, match=rf"/metrics could not be read \(.*{why}"),
    ):
        fetch_page(client, f"http://{place}/metrics")
    assert b"accept-encoding: identity\r\n" in asked[0].lower()


def test_more_than_a_hundred_requests_run_at_once(serve_pages: ServePages) -> None:
    """They wait for each other: with fewer connections, none would be answered."""
    together = threading.Barrier(120, timeout=60)
    url = serve_pages(lambda _: (200, {}, str(together.wait()).encode()))
    with (
        http_client({}, ca_file=None, timeout_s=60, longest_s=60) as client,
        ThreadPoolExecutor(max_workers=120) as threads,
    ):
        answers = list(threads.map(client.get, [url] * 120))
    assert {one.text for one in answers} == {str(number) for number in range(120)}


@contextmanager
def speaking(
    speak: Callable[[int, socket.socket], None], *, address: str = "127.0.0.1", port: int = 0
) -> Iterator[int]:
    """A server's port; `speak` gets each of its connections, with its number, in a thread."""
    threads: list[threading.Thread] = []

    def play(number: int, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            speak(number, sock)

    def accept() -> None:
        for number in itertools.count():
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=play, args=(number, sock)))
            threads[-1].start()

    with socket.create_server((address, port)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    for thread in (accepting, *threads):
        thread.join(30)
        assert not thread.is_alive()


def say(sock: socket.socket, text: str) -> None:
    sock.sendall(f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())


def hear(sock: socket.socket) -> bytes:
    """A whole request, however it is cut; b"" if none comes any more."""
    heard = b""
    while b"\r\n\r\n" not in heard:
        if not (part := sock.recv(4096)):
            return b""
        heard += part
    head, _, body = heard.partition(b"\r\n\r\n")
    [length] = re.findall(rb"(?i)content-length: (\d+)", head)
    while len(body) < int(length):
        body += sock.recv(4096)
    return head + body


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def leave_it(sock: socket.socket) -> None:
    """Without a reset: the request has been read whole."""


@pytest.mark.parametrize("end", [reset, leave_it])
def test_a_request_that_a_kept_connection_leaves_unanswered_goes_out_once_more(
    end: Callable[[socket.socket], None],
) -> None:
    """The server ends each connection when the second request on it has come."""

    def speak(number: int, sock: socket.socket) -> None:
        hear(sock)
        say(sock, f"answer {number}")
        asked.append(hear(sock))
        end(sock)

    asked: list[bytes] = []
    with speaking(speak) as port:
        with http_client({}, ca_file=None, timeout_s=30, longest_s=30) as client:
            url = f"http://127.0.0.1:{port}/"
            texts = [client.post(url, json={"n": n}).text for n in range(3)]
        assert texts == ["answer 0", "answer 1", "answer 2"]
    assert sum(map(bool, asked)) == 1, "a second connection is not kept"


@pytest.mark.parametrize(("kept", "said"), [(False, b""), (True, b"HTTP/1.1 2")])
def test_a_new_connection_and_one_that_began_to_answer_are_not_asked_again(
    kept: bool, said: bytes
) -> None:
    def speak(number: int, sock: socket.socket) -> None:
        connections.append(number)
        if kept:
            sock.recv(4096)
            say(sock, "first")
        sock.recv(4096)
        sock.sendall(said)

    connections: list[int] = []
    with (
        speaking(speak) as port,
        http_client({}, ca_file=None, timeout_s=30, longest_s=30) as client,
    ):
        url = f"http://127.0.0.1:{port}/"
        if kept:
            client.get(url)
        with pytest.raises(httpx.TransportError):
            client.get(url)
    assert connections == [0]


def test_a_name_is_the_address_that_accepted_its_first_connection() -> None:
    def speak(address: str) -> Callable[[int, socket.socket], None]:
        def answer(_: int, sock: socket.socket) -> None:
            hosts.append(sock.recv(4096).partition(b"Host: ")[2].partition(b"\r\n")[0].decode())
            say(sock, address)

        return answer

    hosts: list[str] = []
    with ExitStack() as others:
        port = others.enter_context(speaking(speak("127.0.0.2"), address="127.0.0.2"))
        page = others.enter_context(speaking(speak("page"), address="127.0.0.2"))
        place = Place(f"http://localhost:{port}")
        place.addresses = ["127.0.0.1", "127.0.0.3", "127.0.0.2"]  # nobody listens at the first
        client = others.enter_context(
            http_client(
                {"connection": "close"}, ca_file=None, timeout_s=9, longest_s=9, place=place
            )
        )
        url = f"http://localhost:{port}/"
        with speaking(speak("127.0.0.3"), address="127.0.0.3", port=port):
            assert [client.get(url).text for _ in range(2)] == ["127.0.0.3"] * 2
        assert place.address == "127.0.0.3"
        assert client.get(f"http://localhost:{page}/").text == "page", "a page that is elsewhere"
        with pytest.raises(httpx.ConnectError):
            client.get(url)  # it has gone; the one at 127.0.0.2 is another
    assert hosts == [*[f"localhost:{port}"] * 2, f"localhost:{page}"]
    assert Place("http://127.0.0.9:1").address == "127.0.0.9"


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.1", "localhost", "[::1]", "nowhere.invalid"]
)
def test_loopback_may_be_loaded_and_a_name_without_an_address_passes(host: str) -> None:
    check_host(f"http://{host}:8000", is_allowed=False)


@pytest.mark.parametrize("host", ["192.0.2.1", "[2001:db8::1]", "0.0.0.0", "10.0.0.1"])
def test_another_host_is_loaded_only_by_a_flag(host: str) -> None:
    with pytest.raises(ConfigError, match=r"is not loopback.*--yes-load-this-host"):
        check_host(f"https://{host}/llm", is_allowed=False)
    check_host(f"https://{host}/llm", is_allowed=True)


def test_an_address_of_this_machine_is_told_from_another() -> None:
    assert is_here("http://127.0.0.1:8000")
    assert is_here("http://localhost")
    assert not is_here("http://192.0.2.1:8000")  # kept for documents
    assert not is_here("http://nowhere.invalid")
