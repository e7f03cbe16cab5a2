"""Every mistake that a user can make is one message that names the place and what is allowed.

`refused.json` is the list of refused inputs, each with its whole message, a line each: a file (GOOD
below with a text replaced or added, or a shipped workload) with settings and the files that it
names, the flags of a run, what its server says of itself, fields of the web page's form, or limits
of a gate. To record it anew after a change of words:
`python -m tests.harness.workload.test_refused`.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.gate.limits import parse_limits
from harness.run.run_config import RunConfig, make_load_plan, resolve_run
from harness.workload.form import (
    BY_HAND,
    about_fields,
    check_each_applies,
    check_startable,
    form_settings,
)
from harness.workload.workload import load_target, load_workload
from tests.harness.plans import server

LIST = Path(__file__).with_name("refused.json")
REFUSED: list[dict[str, Any]] = json.loads(LIST.read_bytes())
GOOD = """\
question = "q?"
[run]
users = 2
max_seconds = 5
[load]
kind = "abandon"
abandon_after_tokens = [0, 4]
stay_share = 0.5
prompt_tokens = [8, 16]
answer_tokens = 100
stay_tokens = 10
"""


SHOWN = {  # by the form, before a change
    "user_count": "8",
    "walkaway_leave": "workload",
    "walkaway_tokens": "1,16,64",
    "walkaway_seconds": "0.1-2",
    "walkaway_way": "fin",
    "walkaway_arrivals": "workload",
    "walkaway_rate": "1",
}


def read(case: dict[str, Any], folder: Path) -> None:
    for name, content in case.get("files", {}).items():
        (folder / name).write_text(content, newline="")
    file = folder / "mine.toml"
    text = GOOD.replace(*case["replace"]) if "replace" in case else GOOD
    assert "replace" not in case or text != GOOD
    file.write_text(case.get("target") or text + case.get("more", ""))
    name = case.get("workload") or str(file)
    name = BY_HAND if name == "BY_HAND" else name
    if "target" in case or "engine" in case:
        load_target(case.get("engine") or str(file))
    elif "resolve" in case:
        typed = case.get("typed", {})
        run = resolve_run(RunConfig(workload=name, settings=case["settings"], **typed))
        if "server" in case:
            at = server(case["server"])
            arm = run.for_arm(run.arm_runs[0], out=folder) if run.arm_runs else run
            make_load_plan(arm, at, rows_dir=folder)
    elif "limits" in case:
        parse_limits(case["limits"], source="limits.txt", arms=case["arms"])
    elif "form" in case:
        try:
            load_workload(name, form_settings(case["form"]))
        except ConfigError as error:
            raise ConfigError(about_fields(str(error))) from error
    elif "changed" in case:
        check_each_applies(SHOWN | case["changed"], SHOWN)
    elif "page" in case:
        check_startable(load_workload(name, case["settings"]))
    else:
        load_workload(name, case["settings"])


def message(case: dict[str, Any], folder: Path) -> list[str]:
    """The message, a line each, without what differs from machine to machine."""
    with pytest.raises(ConfigError) as refused:
        read(case, folder)
    text = str(refused.value).replace(str(folder), "FOLDER").replace(str(Path.cwd()), "HERE")
    return re.sub(r"/[\w/.-]*/workloads/", "WORKLOADS/", text).split("\n")


def test_the_file_that_the_mistakes_are_put_into_is_good(tmp_path: Path) -> None:
    read({"settings": []}, tmp_path)


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["message"][0][:60])
def test_a_mistake_is_refused_in_these_words(case: dict[str, Any], tmp_path: Path) -> None:
    assert message(case, tmp_path) == case["message"]


if __name__ == "__main__":
    with TemporaryDirectory() as made:
        said = [{**case, "message": message(case, Path(made))} for case in REFUSED]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in said)
    LIST.write_text(f"[\n{lines}\n]\n")
