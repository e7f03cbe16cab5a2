"""What CI systems read: tests as JUnit's XML, and cells and code of Markdown."""

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple
from xml.etree import ElementTree as ET

JUNIT_MARK: Final = b'<testsuite name="walkaway '  # in the head of each such file
_NO_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Tag = Literal["system-out", "failure", "error", "skipped"]


class JunitTest(NamedTuple):
    """`message`: the line that a CI shows; `said`: all of it."""

    name: str
    tag: Tag
    message: str
    said: str
    took_s: float = 0.0


def junit(name: str, tests: Sequence[JunitTest]) -> bytes:
    tags = [one.tag for one in tests]
    counts = {
        "tests": str(len(tags)),
        "failures": str(tags.count("failure")),
        "errors": str(tags.count("error")),
    }
    if "skipped" in tags:
        counts["skipped"] = str(tags.count("skipped"))
    name = clean(name)
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": name, **counts})
    for one in tests:
        about = {"classname": name, "name": clean(one.name), "time": f"{one.took_s:g}"}
        message = {"message": clean(one.message)} if one.tag != "system-out" else {}
        result = ET.SubElement(ET.SubElement(suite, "testcase", about), one.tag, message)
        result.text = clean(one.said)
    ET.indent(suites)
    content: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def clean(text: str) -> str:
    return _NO_XML.sub("?", text)


def markdown_cell(text: str) -> str:
    for mark, shown in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), (">", "&gt;"), ("`", "'")):
        text = text.replace(mark, shown)
    return " ".join(text.split())


def markdown_code(text: str) -> str:
    return " ".join(text.replace("`", "'").replace("|", "\\|").split())
