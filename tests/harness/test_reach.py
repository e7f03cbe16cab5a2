"""Why a server was not reached is said in words that help."""

import contextlib
import errno
import gzip
import os
import resource
import select
import socket
import ssl
import threading
from pathlib import Path

import httpx
import pytest

from harness.collect.scrape import fetch_page
from harness.collect.source import SourceError
from harness.errors import ConfigError
from harness.http_client import check_ca_file, http_client, split_place, tls_context, why_unreached


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
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "h", "no host h (Name"),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
            "::1",
            "no server listens at [::1]:9",
        ),
        (verification_error(), "h", "of h is not trusted (self-signed certificate): name the CA"),
        (
            verification_error(62, "Hostname mismatch"),
            "h",
            "is for another host (Hostname mismatch): use a",
        ),
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
        (
            TimeoutError("_ssl.c:9: The handshake operation timed out"),
            "h",
            "h:9 does not answer a",
        ),
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
        why = why_unreached(socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "h", 9)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert why == f"no file handle is left, of {probe}: use fewer users, or raise `ulimit -n`"


def test_places() -> None:
    assert split_place("http://[::1]:8000/v1") == ("::1", 8000)
    assert split_place("https://example.org") == ("example.org", 443)


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


@pytest.mark.parametrize("drop", [b"y", b""], ids=["in drops", "silent"])
def test_an_answer_without_end_is_given_up(drop: bytes) -> None:
    """Each byte would be in time for the next; the whole is not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def drip() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(b"HTTP/1.1 200 OK\r\nx: ")
                assert sock.recv(4096)
                for _ in range(1000):
                    if select.select([sock], [], [], 0.01)[0]:
                        return  # the client has left
                    sock.sendall(drop)

        thread = threading.Thread(target=drip)
        thread.start()
        with (
            http_client({}, ca_file=None, timeout_s=30.0, longest_s=0.3) as client,
            pytest.raises(httpx.ReadTimeout),
        ):
            client.get(url)
        thread.join(30)
    assert not thread.is_alive()


def test_an_answer_of_too_many_bytes_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def pour() -> None:
            with listener.accept()[0] as sock, contextlib.suppress(OSError):
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    sock.sendall(bytes(1 << 20))

        thread = threading.Thread(target=pour)
        thread.start()
        with (
            http_client({}, ca_file=None, timeout_s=30.0, longest_s=60.0) as client,
            pytest.raises(SourceError, match=r"/metrics could not be read \(.* more than 32 MiB\)"),
        ):
            fetch_page(client, f"{url}/metrics")
        thread.join(30)
    assert not thread.is_alive()


def test_an_answer_that_is_packed_is_not_unpacked() -> None:
    """A thousand times as large as it came; and nobody asks for such a one."""
    asked = []
    packed = gzip.compress(bytes(1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def answer() -> None:
            with listener.accept()[0] as sock:
                asked.append(sock.recv(4096))
                head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n"
                sock.sendall(head % len(packed) + packed)

        thread = threading.Thread(target=answer)
        thread.start()
        with (
            http_client({}, ca_file=None, timeout_s=30.0, longest_s=30.0) as client,
            pytest.raises(
                SourceError, match=r"could not be read \(the answer is compressed, which"
            ),
        ):
            fetch_page(client, f"{url}/metrics")
        thread.join(30)
    assert b"accept-encoding: identity\r\n" in asked[0].lower()
