"""`walkaway conform --upstream`: a gateway in good order, a bad one, and what cannot be judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.run.process import free_port
from harness.store.conform_result import Aftermath, Verdict
from tests.e2e.running import faulty_gateway
from tests.harness.upstream.behind import upstream
from tools.truth.conform_gateways import ROWS, Row, run, wrong

pytestmark = pytest.mark.e2e
SOON = ("hop/fin-decode", "hop/silent-prefill", "hop/unary", "hop/queue", "hop/no-retry")


def row(**faults: object) -> Row:
    return next(one for one in ROWS if one.faults == faults)


@pytest.mark.parametrize("one", [row(), row(late_s=3.0)], ids=lambda one: one.name)
def test_a_gateway_is_red_where_it_is_wrong(one: Row) -> None:
    result = run(one._replace(has_bill=False), ["messages"], SOON)
    assert not wrong(one, result)
    (leave,) = (case for case in result.cases if case.id == "hop/fin-decode/messages")
    assert leave.dialect == "messages"
    assert leave.way == "upstream"
    assert leave.contract == ("drain" if one.faults else "cancel")
    assert leave.cap_s == (pytest.approx(3.0, abs=0.2) if one.faults else None)
    assert len(leave.tries) == 4
    for seen in leave.tries:
        assert seen.upstream_stopped_s is not None
        assert seen.tokens_after_leave == pytest.approx(10 * seen.upstream_stopped_s, abs=1)


def conform(url: str, port: int, *words: str, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", "conform", "--upstream", str(port)]
    flags = ["--target", url, "--out", str(out)]
    return subprocess.run([*command, *flags, *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"needs_key": "secret"}, "wants a key"),
        ({"answers_from_cache": True}, "answers from a cache"),
    ],
    ids=str,
)
def test_a_gateway_that_cannot_be_judged_says_why(
    faults: dict[str, str], said: str, tmp_path: Path
) -> None:
    port = free_port()
    with faulty_gateway(f"http://127.0.0.1:{port}", **faults) as gateway:
        done = conform(gateway.url, port, "hop/fin-decode", out=tmp_path / "out")
    assert done.returncode == 5
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("fault", "case", "aftermath"),
    [
        ("dies", "hop/fin-decode/chat", Aftermath.DEAD),
        pytest.param("wedges", "hop/no-penalty/chat", Aftermath.WEDGED, marks=pytest.mark.table),
    ],
)
def test_a_gateway_that_serves_nobody_after_leaves_is_red_and_ends_the_run(
    fault: str, case: str, aftermath: Aftermath, tmp_path: Path
) -> None:
    port, cases = free_port(), ("hop/fin-decode/chat", "hop/no-penalty/chat")
    with faulty_gateway(f"http://127.0.0.1:{port}", **{fault: 3}) as gateway:
        done = conform(gateway.url, port, *cases, "--json", out=tmp_path / "out")
    results = {one["id"]: one for one in json.loads(done.stdout)["cases"]}
    assert results[case]["verdict"] == Verdict.FAIL
    assert results[case]["aftermath"] == aftermath
    assert "clients had left in all, the gateway serves nobody any more" in results[case]["reason"]
    assert done.returncode == 3


def test_a_gateway_before_another_server_is_found_out(tmp_path: Path) -> None:
    port = free_port()
    with upstream() as other, faulty_gateway(other.url) as gateway:
        done = conform(gateway.url, port, "hop/fin-decode", out=tmp_path / "out")
    assert done.returncode == 5
    assert f"no request of ours arrived at port {port}" in done.stderr


def test_two_servers_behind_a_gateway_are_found_out(tmp_path: Path) -> None:
    port = free_port()
    with (
        upstream() as other,
        faulty_gateway(f"http://127.0.0.1:{port}", two_upstreams=other.url) as gateway,
    ):
        done = conform(gateway.url, port, "hop/fin-decode", out=tmp_path / "out")
    assert done.returncode == 5
    assert f"requests arrived at port {port}: the gateway sends some" in done.stderr


def test_one_dialect_is_judged_and_the_others_are_not_supported(tmp_path: Path) -> None:
    port = free_port()
    with faulty_gateway(f"http://127.0.0.1:{port}", one_dialect="chat") as gateway:
        done = conform(gateway.url, port, "hop/half-close", "--json", out=tmp_path / "out")
    cases = {one["dialect"]: one["verdict"] for one in json.loads(done.stdout)["cases"]}
    assert cases.pop("chat") == Verdict.INFO
    assert set(cases.values()) == {Verdict.NOT_SUPPORTED}


def test_without_a_gateway_or_a_free_port_it_says_so(tmp_path: Path) -> None:
    with upstream() as other:
        done = conform("http://127.0.0.1:9", other.port, out=tmp_path / "out")
        assert done.returncode == 2
        assert "listens there already" in done.stderr
    done = conform("http://127.0.0.1:9", free_port(), out=tmp_path / "out")
    assert done.returncode == 2
    assert "no server listens at 127.0.0.1:9" in done.stderr
