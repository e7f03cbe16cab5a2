"""The page: the templates' data, with everything from outside made harmless.

A page is one file that fetches nothing: a Content-Security-Policy allows the page's scripts by
their hashes and nothing else. Text from a run reaches the page through Jinja's escaping, or as
JSON in which "<" cannot occur.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from harness.store.output import write_output

if TYPE_CHECKING:
    from dashboards.sections.section import Section

TEMPLATES: Final = files("dashboards") / "templates"
PLOTLY: Final = "plotly-basic.min.js"
GENERATOR: Final = b'<meta name="generator" content="walkaway">'


def document(
    template: str,
    sections: Mapping[str, Sequence["Section"]],
    *,
    requests: Mapping[str, object] | None = None,
    scripts: Sequence[str] | None = None,
    **content: object,
) -> str:
    """One HTML document. `template` extends `page.html.j2` and gets `content`; it draws the
    `sections` of each anchor with the macro `pictured`. `requests`: the data for `requests.js`, by
    anchor. `scripts`: the scripts of a page without pictures by Plotly.
    """
    environment = Environment(
        loader=PackageLoader("dashboards"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly = "" if scripts is not None else _own_line(_template(PLOTLY))
    if scripts is None:
        scripts = ("page.js",) if requests is None else ("page.js", "requests.js")
    texts = [_own_line(_template(name)) for name in scripts]
    return environment.get_template(template).render(
        content,
        policy=content_security_policy([*filter(None, [plotly]), *texts]),
        style=Markup(_template("page.css")),
        plotly=Markup(plotly),
        scripts=[Markup(text) for text in texts],
        figures=Markup(json_for_script(_figures(sections))),
        requests=Markup(json_for_script(requests)),
    )


def save(html: str, output: Path) -> None:
    """Write a page, only over another page. Raises `ConfigError`."""
    write_output(output, html.encode(), ours=GENERATOR)


def content_security_policy(scripts: Sequence[str]) -> str:
    """Nothing may be fetched; only these scripts may run. Styles are inline (Plotly sets them)."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def json_for_script(data: object) -> str:
    """JSON that may stand in a <script>: no "<", so nothing in it can end the element."""
    return msgspec.json.encode(data, enc_hook=_of_numpy).decode().replace("<", "\\u003c")


def _of_numpy(value: Any) -> Any:
    """Scalars, and the arrays that Plotly leaves as they are: the empty ones."""
    return value.tolist()


def _figures(sections: Mapping[str, Sequence["Section"]]) -> Mapping[str, Any]:
    return {
        f"{anchor}-{picture.name}": picture.figure.to_plotly_json()
        for anchor, of_one_run in sections.items()
        for section in of_one_run
        for picture in section.pictures
    }


def _own_line(script: str) -> str:
    """The text as it stands between the tags: the hash covers every character there."""
    return f"\n{script.strip()}\n"


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")
