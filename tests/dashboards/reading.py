"""A page read back with a parser: its elements, its figures, and all of it as text."""

import base64
import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from dashboards.__main__ import main

VOID = {"meta", "link", "br", "img", "input", "hr"}
LINES = {"h1", "h2", "h3", "p", "li", "dt", "dd", "tr", "figcaption"}  # each a line of the text


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(html)
        self.close()
        assert not self._open, "an element was left open"
        ids = [of["id"] for _, of, _ in self.elements if of.get("id")]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        for index in self._open:
            self.elements[index][2].append(data)

    def texts(self, tag: str) -> list[str]:
        return [" ".join("".join(text).split()) for name, _, text in self.elements if name == tag]

    @property
    def body(self) -> str:
        return " ".join(self.texts("main"))

    def alts(self) -> dict[str, str]:
        return {
            str(of["id"]): str(of["aria-label"])
            for _, of, _ in self.elements
            if of.get("role") == "img"
        }

    def scripts(self) -> list[str]:
        return [
            "".join(text)
            for tag, attributes, text in self.elements
            if tag == "script" and attributes.get("type") != "application/json"
        ]

    def figures(self) -> dict[str, Any]:
        """The figures for Plotly, by the picture's id; columns as lists."""
        (text,) = (
            text for _, attributes, text in self.elements if attributes.get("id") == "figures"
        )
        figures: dict[str, Any] = json.loads("".join(text), object_hook=_decoded)
        return figures

    def policy(self) -> str:
        (policy,) = (
            attributes["content"]
            for _, attributes, _ in self.elements
            if attributes.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy is not None
        return policy

    def content(self) -> str:
        lines = [
            f"{tag} {' '.join(' '.join(part.split()) for part in text if part.strip())}"
            for tag, _, text in self.elements
            if tag in LINES
        ]
        for name, figure in self.figures().items():
            lines += ["", f"{name}: {self.alts()[name]}", *_lines_of(figure)]
        return "\n".join(lines) + "\n"


def _decoded(found: dict[str, Any]) -> Any:
    if "bdata" not in found:
        return found
    return np.frombuffer(base64.b64decode(found["bdata"]), found["dtype"]).tolist()


def _lines_of(figure: dict[str, Any]) -> Iterator[str]:
    for trace in figure["data"]:
        shown = [f"{key} {_column(trace[key])}" for key in ("x", "y")]
        shown += [f"{key} {trace[key]}" for key in ("mode", "name", "yaxis") if key in trace]
        errors = [f"{key} {_column(trace[key]['array'])}" for key in trace if "error" in key]
        marker = trace.get("marker", {})
        looks = [str(trace.get("line", {}).get("dash", "")), str(marker.get("symbol", ""))]
        looks.append(str(marker.get("pattern", {}).get("shape", "")))
        yield f"  {trace['type']}: {'; '.join([*shown, *errors, *filter(None, looks)])}"
    layout = figure["layout"]
    for axis in ("xaxis", "yaxis"):
        of = layout[axis]
        keys = ("type", "range", "ticktext", "categoryarray", "autorange")
        said = [f"{key} {_rounded(of[key])}" for key in keys if key in of]
        yield f"  {axis} {of['title']['text']}: {'; '.join(said)}"
    for note in layout.get("annotations", []):
        yield f"  note {note['text']} at {_rounded([note['x'], note['y']])}"
    for shape in layout.get("shapes", []):
        ends = [shape[key] for key in ("x0", "x1", "y0", "y1")]
        yield f"  {shape['type']} {_rounded(ends)}"


def _column(values: list[Any]) -> str:
    if len(values) <= 6:
        return str(_rounded(values))
    numbers = [value for value in values if isinstance(value, int | float)]
    mean = f", mean {sum(numbers) / len(numbers):.4g}" if numbers else ""
    return f"{len(values)} from {_rounded(values[0])} to {_rounded(values[-1])}{mean}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def page_by(command: str, *paths: Path, output: Path | None = None) -> Page:
    output = output or paths[0] / f"{command}.html"
    assert main([command, *map(str, paths), "-o", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8"))
