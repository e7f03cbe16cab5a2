"""URLs and headers as they were typed: what is refused, and that no secret is repeated."""

import pytest

from harness.errors import ConfigError
from harness.http_client import check_metrics_url, check_target_url, parse_headers


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


def test_headers_are_read() -> None:
    assert parse_headers(["A=1", "X-B=c=d"]) == {"A": "1", "X-B": "c=d"}


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
