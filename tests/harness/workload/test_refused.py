"""Every mistake in a file or a --set is one message that names file, key and what is allowed.

`refused.json` is the list of refused inputs, each with its whole message, a line each: a file (GOOD
below with a text replaced or added, or a shipped workload), and settings. To record it anew after a
change of words: `python -m tests.harness.workload.test_refused`.
"""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.run.run_config import RunConfig, resolve_run
from harness.workload.workload import load_target, load_workload

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


def read(case: dict[str, Any], folder: Path) -> None:
    file = folder / "mine.toml"
    text = GOOD.replace(*case["replace"]) if "replace" in case else GOOD
    assert "replace" not in case or text != GOOD
    file.write_text(case.get("target") or text + case.get("more", ""))
    if "target" in case or "engine" in case:
        load_target(case.get("engine") or str(file))
    elif "resolve" in case:
        resolve_run(
            RunConfig(workload=case.get("workload") or str(file), settings=case["settings"])
        )
    else:
        load_workload(case.get("workload") or str(file), case["settings"])


def message(case: dict[str, Any], folder: Path) -> list[str]:
    """The message, a line each, without what differs from machine to machine."""
    with pytest.raises(ConfigError) as refused:
        read(case, folder)
    text = str(refused.value).replace(str(folder), "FOLDER")
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
