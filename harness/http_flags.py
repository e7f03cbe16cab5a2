"""What was typed about HTTP, checked before anything is started: URLs, headers, the API key.

Messages name the flag and what it must look like. They never repeat a header's value, and a URL
that holds a password is refused: it would stand in the manifest and in the report.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

import httpx

from harness.errors import ConfigError
from harness.reach import tls_context

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
