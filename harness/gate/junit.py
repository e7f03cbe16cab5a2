"""A judgement as JUnit XML, which every CI shows: a test for each limit.

A limit that is broken is a failure; one that cannot be decided is an error, so that nobody takes it
for a pass.
"""

import re
from typing import Final
from xml.etree import ElementTree as ET

from harness.gate.judge import Judgement
from harness.gate.verdict import Verdict

_TAGS: Final = {Verdict.FAIL: "failure", Verdict.CANNOT_DECIDE: "error"}
_NO_XML: Final = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def as_junit(judgement: Judgement) -> bytes:
    """The file's content."""
    verdicts = [one.verdict for one in judgement.checks]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.CANNOT_DECIDE)),
    }
    name = f"walkaway gate {judgement.workload or ''}".strip()
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": _clean(name), **counts})
    for one in judgement.checks:
        case = ET.SubElement(
            suite, "testcase", {"classname": _clean(name), "name": _clean(one.name), "time": "0"}
        )
        lines = [
            one.measured,
            one.reason,
            f"would decide: {one.to_decide}" if one.to_decide else "",
        ]
        text = _clean("\n".join(line for line in lines if line))
        if (tag := _TAGS.get(one.verdict)) is not None:
            message = _clean(": ".join(part for part in (one.measured, one.reason) if part))
            ET.SubElement(case, tag, {"message": message}).text = text
        else:
            ET.SubElement(case, "system-out").text = text
    ET.indent(suites)
    content: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _clean(text: str) -> str:
    return _NO_XML.sub("?", text)
