"""The page: what the templates are given, and how everything from outside is made harmless.

One file, no requests: the browser is told so by a Content-Security-Policy that allows the scripts
in the page by their hashes and nothing else. Text from a run (model names, errors, labels) reaches
the page through Jinja's escaping, or as JSON in which "<" cannot occur.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from dashboards.headline import Card
from dashboards.section import Section
from dashboards.tables import COLUMNS, PlainTable, Row, SideBySide
from dashboards.trust import Trust
from dashboards.verdict import Verdict
from harness.errors import ConfigError

TEMPLATES: Final = files("dashboards") / "templates"

GENERATOR: Final = b'<meta name="generator" content="walkaway">'
_HEAD_BYTES: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The list of single requests: which they are, in words, and their data (`request_rows`)."""

    words: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """Everything the page says about one run, as text.

    `cautions` say that figures mean nothing and stand before them, and then no `sentence` is made
    of these; `warnings` are only counted there, beside what `trust` says in brief, so that the
    first screen has room for the figures, and stand with the `remarks` below.
    """

    anchor: str
    run_id: str
    question: str
    verdict: Verdict | None
    sentence: str | None
    status: str
    cards: Sequence[Card]
    facts: Sequence[tuple[str, str]]
    trust: Sequence[Trust] = ()
    cautions: list[tuple[str, str]]
    warnings: list[tuple[str, str]]
    remarks: list[tuple[str, str]]
    not_measurable: Sequence[tuple[str, Sequence[str]]]
    side_by_side: Sequence[SideBySide] = ()
    accounts: Sequence[PlainTable] = ()
    sections: Sequence[Section]
    listing: Listing | None = None
    rows: Sequence[Row]
    command: str
    machine: Sequence[tuple[str, str]]


def render(articles: Sequence[Article]) -> str:
    """The whole report as one HTML document."""
    sections = {article.anchor: article.sections for article in articles}
    listed = {one.anchor: one.listing.data for one in articles if one.listing is not None}
    return document(
        "report.html.j2",
        sections,
        scripts=("page.js", "requests.js"),
        articles=articles,
        columns=COLUMNS,
        requests=Markup(json_for_script(listed)),
    )


def document(
    template: str,
    sections: Mapping[str, Sequence[Section]],
    *,
    scripts: Sequence[str] = ("page.js",),
    **content: object,
) -> str:
    """One HTML document. `template` extends `page.html.j2` and is given `content`; it draws the
    `sections` of each anchor with the macro `pictured`. `scripts` are files beside the templates.
    """
    environment = Environment(
        loader=PackageLoader("dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly, *texts = [_own_line(text) for text in (get_plotlyjs(), *map(_template, scripts))]
    return environment.get_template(template).render(
        content,
        policy=content_security_policy([plotly, *texts]),
        style=Markup(_template("page.css")),
        plotly=Markup(plotly),
        scripts=[Markup(text) for text in texts],
        figures=Markup(json_for_script(_figures(sections))),
    )


def save(html: str, output: Path) -> None:
    """Write a page, whole or not at all, over nothing but such a page. Raises `ConfigError` where
    that cannot be."""
    output = output.resolve()  # where it is a link: what it leads to
    part = output.with_name(f"{output.name}.part")
    try:
        if output.is_file() and not _is_page(output):
            raise ConfigError(
                f"{output}: is no page of walkaway; move it away, or name another file"
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        if output.exists() and not output.is_file():  # /dev/stdout, say
            output.write_text(html, encoding="utf-8")
            return
        try:
            part.write_text(html, encoding="utf-8")
            part.replace(output)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}") from error


def _is_page(file: Path) -> bool:
    with file.open("rb") as opened:
        start = opened.read(_HEAD_BYTES)
    return not start or GENERATOR in start


def content_security_policy(scripts: Sequence[str]) -> str:
    """Nothing may be fetched; only these scripts may run. Styles are inline (plotly sets them)."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def json_for_script(data: object) -> str:
    """JSON that may stand in a <script>: no "<", so nothing in it can end the element."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _figures(sections: Mapping[str, Sequence[Section]]) -> Mapping[str, Any]:
    return {
        f"{anchor}-{picture.name}": msgspec.Raw(picture.figure.to_json().encode())
        for anchor, those in sections.items()
        for section in those
        for picture in section.pictures
    }


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _own_line(script: str) -> str:
    """As it stands between the tags: the hash is of every character there."""
    return f"\n{script.strip()}\n"


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
