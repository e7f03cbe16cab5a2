"""What a gateway says was used: its own page, log or database, read as sums over all requests.

An adapter is a TOML file, shipped by name (harness/targets/usage) or given as a path. It names one
of `page`, `file` and `database`, and how to add up the tokens of answers that stand there. Sums
need no name of a request, which gateways do not keep: what a request added is the difference.
"""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self

import httpx
from pydantic import Field, model_validator

from harness.collect.scrape import parse_page
from harness.errors import ConfigError, in_words
from harness.experiments.outcome import CannotDecideError
from harness.http_client import why_unread
from harness.workload.toml_file import read_toml, validate
from harness.workload.values import Seconds, TomlTable
from harness.workload.workload import find_file

_PACKAGE: Final = "harness.targets.usage"


class UsageSource(TomlTable):
    """`page`: of the gateway, a path or a whole URL, with `headers`; `file`: one JSON object per
    line; `database`: SQLite, with a `query` whose one value is the sum. `rows`: the key of the list
    in the page, if it is not the page itself; `tokens`: the key of a row's count, with dots for
    inner ones; `metric`: of a page in Prometheus' format, instead of both. `settle_s`: how long
    after its end a request may be missing there."""

    description: str = ""
    page: str | None = None
    file: str | None = None
    database: str | None = None
    query: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    rows: str | None = None
    tokens: str | None = None
    metric: str | None = None
    settle_s: Seconds = 3.0

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if len(self.places) != 1:
            raise ValueError("name one of `page`, `file` and `database`")
        if (self.database is None) != (self.query is None):
            raise ValueError("`database` and `query` go together")
        if self.database is None and (self.tokens is None) == (self.metric is None):
            raise ValueError("name either `tokens` or, of a page in Prometheus' format, `metric`")
        return self

    def needs_key(self, url: str) -> bool:
        """Whether its page is one of the gateway at this URL, and not of another port."""
        if self.page is None:
            return False
        return httpx.URL(_page(url, self.page)).netloc == httpx.URL(url).netloc

    @property
    def where(self) -> str:
        (place,) = self.places.values()
        return place

    @property
    def places(self) -> dict[str, str]:
        named = {"page": self.page, "file": self.file, "database": self.database}
        return {kind: place for kind, place in named.items() if place is not None}


def read_usage(wanted: str, url: str) -> UsageSource:
    """ "ADAPTER" or "ADAPTER=PLACE": a shipped name or a TOML file, and where the page, file or
    database of the gateway at this URL is. Raises ConfigError."""
    name, _, place = wanted.partition("=")
    path = find_file(name, package=_PACKAGE, noun="usage adapter")
    source = validate(UsageSource, read_toml(path), source=str(path))
    (kind,) = source.places
    place = place or source.where
    if kind == "page":
        _check_page(url, place)
    else:
        place = str(Path(place).resolve())
    return source.model_copy(update={kind: place})


def usage_reader(source: UsageSource, url: str, client: httpx.Client) -> Callable[[], int]:
    """Reads the tokens of all answers so far. `url`: of the gateway. It raises
    CannotDecideError."""
    if source.database is not None:
        return lambda: _of_database(Path(str(source.database)), str(source.query))
    if source.file is not None:
        return lambda: _of_file(Path(str(source.file)), str(source.tokens))
    page = _page(url, str(source.page))

    def read() -> int:
        try:
            answer = client.get(page, headers=source.headers).raise_for_status()
            if source.metric is not None:
                return _of_metrics(answer.text, source.metric)
            rows = answer.json() if source.rows is None else _inner(answer.json(), source.rows)
            if not isinstance(rows, list):
                raise TypeError(f"{source.rows or 'the page'} is no list")
            return sum(_tokens(row, str(source.tokens)) for row in rows)
        except httpx.HTTPError as error:
            raise CannotDecideError(f"{page} cannot be read ({why_unread(error)})") from error
        except (ValueError, TypeError, KeyError) as error:
            raise CannotDecideError(f"{page} has no such rows: {error}") from error

    return read


def _page(url: str, page: str) -> str:
    return url.rstrip("/") + page if page.startswith("/") else page


def _check_page(url: str, page: str) -> None:
    """Raises ConfigError for a page of another host."""
    if httpx.URL(_page(url, page)).host != httpx.URL(url).host:
        raise ConfigError(f"--usage: {page} is no page of the gateway at {url}")


def _of_metrics(text: str, metric: str) -> int:
    """A counter's name may lack its ending."""
    samples = parse_page(text, t_ns=0, duration_ns=0, extra_labels={})
    names = (metric, f"{metric}_total")
    return round(sum(one.value for one in samples if one.name in names))


def _of_database(file: Path, query: str) -> int:
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
            return int(connection.execute(query).fetchone()[0] or 0)
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise CannotDecideError(f"{file} cannot be read: {in_words(error)}") from error


def _of_file(file: Path, tokens: str) -> int:
    """A gateway that has billed nothing yet may have no file. A line that is still being written
    has no end."""
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()
        return sum(_tokens(json.loads(line), tokens) for line in lines if line.strip())
    except (OSError, ValueError, TypeError) as error:
        raise CannotDecideError(f"{file} cannot be read: {in_words(error)}") from error


def _tokens(row: Any, key: str) -> int:
    found = _inner(row, key)
    return 0 if found is None else int(found)


def _inner(value: Any, key: str) -> Any:
    """None where a part of the way is missing."""
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
