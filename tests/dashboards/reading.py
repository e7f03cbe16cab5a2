"""A report read back with a parser."""

import base64
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from dashboards.__main__ import main

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page with their attributes and own text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(html)
        self.close()
        assert not self._open, "an element was left open"

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

    def scripts(self) -> list[str]:
        """All that may run: plotly is text at first."""
        return [
            "".join(text)
            for tag, attributes, text in self.elements
            if tag == "script" and attributes.get("type") != "application/json"
        ]

    def figures(self) -> dict[str, Any]:
        (text,) = (
            text for _, attributes, text in self.elements if attributes.get("id") == "figures"
        )
        figures: dict[str, Any] = json.loads("".join(text))
        return figures

    def policy(self) -> str:
        (policy,) = (
            attributes["content"]
            for _, attributes, _ in self.elements
            if attributes.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy is not None
        return policy


def page_of(*runs: Path) -> Page:
    output = runs[0] / "report.html"
    assert main(["report", *map(str, runs), "-o", str(output)]) == 0
    return Page(output.read_text(encoding="utf-8"))


def body_of(page: Page) -> str:
    return " ".join(page.texts("main"))


def decoded(column: Any) -> list[float]:
    """A column as plotly writes it: a list, or a typed array in base64."""
    if isinstance(column, dict):
        return [float(x) for x in np.frombuffer(base64.b64decode(column["bdata"]), column["dtype"])]
    return list(column)
