"""README and the pages of docs/, as text to be checked: blocks, commands, tables, links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
README: Final = ROOT / "README.md"
PAGES: Final = sorted((ROOT / "docs").glob("*.md"))

_BLOCK: Final = re.compile(r"(?:<!-- test: (.*?) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)
_INDENTED: Final = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
_CODE: Final = re.compile(r"`([^`]+)`")
_LINK: Final = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `directive`: a comment before it for the tests, if any."""

    directive: str | None
    language: str
    text: str


def blocks(page: Path, language: str) -> list[Block]:
    """The fenced blocks in this language."""
    found = (
        Block(directive=directive or None, language=language, text=text)
        for directive, language, text in _BLOCK.findall(page.read_text())
    )
    return [block for block in found if block.language == language]


def links(page: Path) -> list[str]:
    """Where its links lead, without the parts of a page."""
    return [target.partition("#")[0] for target in _LINK.findall(page.read_text())]


def commands(page: Path) -> list[list[str]]:
    """Every `walkaway` command in the page, as words: in blocks, and in the text."""
    text = page.read_text()
    prose = _BLOCK.sub("", text)
    lines = [line for block in blocks(page, "bash") for line in _lines(block.text)]
    lines += [line for block in _INDENTED.findall(prose) for line in _lines(block)]
    lines += [" ".join(code.split()) for code in _CODE.findall(_INDENTED.sub("", prose))]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("walkaway ")]
    return [found for found in words if len(found) > 1]


def table_rows(page: Path, heading: str) -> Iterator[list[str]]:
    """The cells of the tables below a heading, up to the next one."""
    _, _, after = f"\n{page.read_text()}".partition(f"\n{heading}\n")
    assert after, f"{page}: has no heading {heading!r}"
    section = re.split(r"^#", after, maxsplit=1, flags=re.MULTILINE)[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            yield cells


def code_in(cell: str) -> list[str]:
    """The pieces of code in a cell."""
    return _CODE.findall(cell)


def _lines(block: str) -> list[str]:
    return [line.strip() for line in block.replace("\\\n", " ").splitlines()]
