"""What a gateway says was used, from its page, its file and its database; and the bill."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.conform.gateway.bill import Bill, judge_bills
from harness.conform.gateway.usage import UsageSource, read_usage, usage_reader
from harness.errors import ConfigError
from harness.experiments.outcome import CannotDecideError
from harness.store.conform_result import Failure
from harness.workload.workload import shipped

URL = "http://127.0.0.1:9"


def client(answer: httpx.Response) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _request: answer))


def reader(answer: httpx.Response | None = None, **source: Any) -> Callable[[], int]:
    return usage_reader(UsageSource(**source), URL, client(answer or httpx.Response(404)))


def test_a_page_of_rows_is_added_up() -> None:
    rows = [{"usage": {"out": 5}}, {"usage": {"out": None}}, {"usage": {"out": 7}}, {}]
    assert reader(httpx.Response(200, json=rows), page="/u", tokens="usage.out")() == 12
    inner = httpx.Response(200, json={"data": {"rows": rows}})
    assert reader(inner, page="/u", rows="data.rows", tokens="usage.out")() == 12


def test_a_page_of_metrics_is_added_up() -> None:
    text = 'out_total{model="a"} 5\nout_total{model="b"} 7\nin_total 9\n'
    assert reader(httpx.Response(200, text=text), page="/metrics", metric="out_total")() == 12


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (httpx.Response(404), "cannot be read"),
        (httpx.Response(200, text="<html>"), "no such rows"),
        (httpx.Response(200, json={"rows": 5}), "no such rows"),
        (httpx.Response(200, json=[{"out": "many"}]), "no such rows"),
    ],
)
def test_a_page_that_is_another_decides_nothing(answer: httpx.Response, said: str) -> None:
    with pytest.raises(CannotDecideError, match=said):
        reader(answer, page="/u", tokens="out")()


def test_a_file_and_a_database_are_added_up(tmp_path: Path) -> None:
    file, database = tmp_path / "spend.jsonl", tmp_path / "db.sqlite"
    read_file = reader(file=str(file), tokens="out")
    assert read_file() == 0  # nothing was billed yet
    file.write_text('{"out": 5}\n\n{"out": 7}\n')
    assert read_file() == 12
    file.write_text('{"out": 5}\n{"ou')  # the second line is being written
    assert read_file() == 5
    file.write_text("{\n")
    with pytest.raises(CannotDecideError, match="cannot be read"):
        read_file()
    query = "SELECT sum(out) FROM used"
    with pytest.raises(CannotDecideError, match="cannot be read"):
        reader(database=str(database), query=query)()
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("CREATE TABLE used (out INTEGER)")
        connection.commit()
        read_database = reader(database=str(database), query=query)
        assert read_database() == 0
        connection.execute("INSERT INTO used VALUES (5), (7)")
        connection.commit()
    assert read_database() == 12


def test_an_adapter_is_named_with_its_place(tmp_path: Path) -> None:
    for name in shipped("harness.targets.usage"):
        assert read_usage(name, URL).description
    assert read_usage(f"litellm={tmp_path}/x.jsonl", URL).file == str(tmp_path / "x.jsonl")
    other_port = read_usage("better-ccflare=http://127.0.0.1:1/u", URL)
    assert other_port.page == "http://127.0.0.1:1/u"
    assert not other_port.needs_key(URL)
    assert read_usage("better-ccflare", URL).needs_key(URL)
    with pytest.raises(ConfigError, match="no page of the gateway"):
        read_usage("better-ccflare=http://10.0.0.1/u", URL)
    with pytest.raises(ConfigError, match="unknown usage adapter `litelm`"):
        read_usage("litelm", URL)
    own = tmp_path / "own.toml"
    for text, said in (
        ('tokens = "out"', "one of `page`, `file` and `database`"),
        ('page = "/u"', "name either `tokens` or"),
        ('database = "db"', "go together"),
    ):
        own.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_usage(str(own), URL)


def test_a_bill_is_wrong_in_somebodys_favour() -> None:
    right = Bill("a stream", delivered=4, billed=5, generated=6)
    over, under = right._replace(billed=12), right._replace(billed=0)
    assert judge_bills([right]).failure is None
    found = judge_bills([right, over, under])
    assert found.failure is Failure.HARM
    assert "6 tokens more than were made (4 delivered, 12 billed, 6 made)" in found.reason
    assert "4 tokens less than the client got (4 delivered, 0 billed, 6 made)" in found.reason
    assert found.evidence["overbilled_tokens"] == 6
    assert found.evidence["unbilled_tokens"] == 4
    json.dumps(found.evidence)
