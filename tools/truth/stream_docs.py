"""docs/streams.md, its table made from the streams that the tests send: `make stream-docs`."""

from pathlib import Path
from typing import Final

from tests.harness.client.odd_streams import KINDS, Odd

PAGE: Final = Path(__file__).parents[2] / "docs" / "streams.md"
BEGIN: Final = "<!-- made by `make stream-docs` -->\n"
HEAD: Final = """
| stream | outcome | first token | tokens | leaves | in the row |
|---|---|---|---:|---|---|
"""


def table() -> str:
    parts = (f"\n### {kind}\n{HEAD}{''.join(map(row, some))}" for kind, some in KINDS.items())
    return BEGIN + "".join(parts)


def row(odd: Odd) -> str:
    outcome = "failed" if odd.error else "completed"
    cells = [odd.name, outcome, place(odd.first), str(odd.tokens), leaving(odd), said(odd)]
    return f"| {' | '.join(cells)} |\n"


def place(part: int | None) -> str:
    return "none" if part is None else f"part {part + 1}"


def leaving(odd: Odd) -> str:
    return "the answer ends first" if odd.leaves is None else f"after part {odd.leaves + 1}"


def said(odd: Odd) -> str:
    text = f"error: {odd.error}" if odd.error else f"unread: {odd.unread}" if odd.unread else ""
    return text.replace("<", "&lt;").replace("|", "&#124;")


def page(before: str) -> str:
    return before.partition(BEGIN)[0] + table()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
