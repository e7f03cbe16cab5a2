"""Several frontends and workers as processes: who leaves, who is killed, and what is left of it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.test_thousand_abandons import SIMULATED, SIZES, all_clients, make_plan
from tests.reference_engine.running_engine import RunningEngine, post_raw, read_until

pytestmark = pytest.mark.e2e

TWO_BY_TWO = ("--frontends", "2", "--workers", "2", "--worker-metrics-port", "0")
STEP_MS = ("--runner", "simulated", "--sim-fixed-ms", "5")
HEARTBEAT_S = 1.0
TIERS = pytest.mark.parametrize("flags", [(), ("--disaggregated",)], ids=["one tier", "two tiers"])


class Tiers(RunningEngine):
    @property
    def urls(self) -> list[str]:
        return list(self.ready["urls"])

    @property
    def workers(self) -> list[str]:
        """Their own pages."""
        return [url.removesuffix("/metrics") for url in self.ready["worker_metrics_urls"]]

    def tier_of(self, worker_url: str) -> str:
        page = httpx.get(f"{worker_url}/metrics").text
        component = page.partition('dynamo_component="')[2].partition('"')[0]
        return {"backend": "worker"}.get(component, component)

    def total(self, name: str, *, of: list[str], **labels: str) -> float:
        return sum(self.metric(name, of=url, **labels) for url in of)

    def restarted(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert line["event"] == "restarted"
        return line

    def are_healthy(self) -> bool:
        answers = [httpx.get(f"{url}/health") for url in self.urls]
        return all(answer.status_code == 200 for answer in answers)

    def is_idle(self) -> bool:
        names = ("num_running", "num_waiting")
        return not any(self.total(f"walkaway_worker_{n}", of=self.workers) for n in names)

    def check_integrity(self) -> None:
        for url in self.workers:
            answer = httpx.get(f"{url}/walkaway/integrity", timeout=30)
            assert (answer.status_code, answer.text)[0] == 200, answer.text


@contextmanager
def tiers(*flags: str, status: int = 0) -> Iterator[Tiers]:
    engine = Tiers(*TWO_BY_TWO, *flags)
    ours = psutil.Process(engine.process.pid)
    children = ours.children(recursive=True)
    try:
        yield engine
        children += ours.children(recursive=True)
    finally:
        assert engine.stop() == status
        _, left = psutil.wait_procs(children, timeout=10)
    assert not left


@TIERS
def test_a_thousand_disconnects_count_once_at_every_tier_that_had_them(
    flags: tuple[str, ...],
) -> None:
    random, tier_names = Random(11), ("prefill", "decode") if flags else ("worker",)
    further = ["handed_over", "handed_over", "taken_over"] if flags else []
    plans = [make_plan(number, random, *further) for number in range(1000)]

    async def all_at_once(engine: Tiers) -> None:
        halves = plans[:500], plans[500:]
        turns = []
        for url, mine in zip(engine.urls, halves, strict=True):
            host, port = url.removeprefix("http://").split(":")
            turns.append(all_clients((host, int(port)), mine))
        await asyncio.gather(*turns)

    with tiers(*SIMULATED, *SIZES, *flags) as engine:
        asyncio.run(all_at_once(engine))
        wait_until(engine.is_idle)
        ended, told, in_between = set[str](), Counter[str](), 0
        for index, url in enumerate(engine.urls):
            entries = engine.events(of=url)
            assert {entry["worker"] for entry in entries} == {
                f"{tier}-{number}" for tier in tier_names for number in (0, 1)
            }
            assert {entry["request_id"].rpartition("-req-")[0] for entry in entries} == {
                f"frontend-{index}"
            }
            lines = Counter((e["client_request_id"], e["worker"], e["event"]) for e in entries)
            assert max(lines.values()) == 1, "no line twice, and a client's name on each"
            ended |= {e["client_request_id"] for e in entries if e["reason"] == "abort"}
            for name, worker, event in lines:
                told[worker[:-2]] += event == "abort_received"
                in_between += event == "abort_received" and lines[name, worker, "handed_over"]
            assert engine.metric("dynamo_frontend_model_cancellation_total", of=url) == 500
            aborted = {"finished_reason": "abort"}
            assert engine.metric("vllm:request_success_total", of=url, **aborted) == 1000
            assert engine.metric("vllm:kv_cache_usage_perc", of=url) == 0
        assert ended == {plan.name for plan in plans}
        first, *behind = tier_names
        counted = "dynamo_component_cancellation_total"
        kinds = {"worker": "backend"}
        heard = {
            tier: engine.total(counted, of=mine, dynamo_component=kinds.get(tier, tier))
            for tier in tier_names
            if (mine := [url for url in engine.workers if engine.tier_of(url) == tier])
        }
        assert heard[first] == 1000, "it hears of those that it has handed over, too"
        assert all(heard[tier] == told[tier] for tier in behind)
        names = "walkaway_worker_cancellations_total", {"learned_by": "control_message"}
        assert engine.total(names[0], of=engine.workers, **names[1]) == sum(heard.values())
        assert engine.total(names[0], of=engine.workers) == sum(heard.values())
        assert engine.total("walkaway_worker_aborted_requests_total", of=engine.workers) == 1000
        assert not flags or in_between > 20, "both workers had it"
        engine.check_integrity()


def body_of(answer: str) -> str:
    return "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        for line in answer.split("\n\n")
        if line.startswith("data: {")
    )


class Users:
    """They ask one frontend after the other for the same answer; what each got is counted."""

    def __init__(self, urls: list[str], *, num_tokens: int) -> None:
        self._urls = urls
        self._ask = {"model": "tiny", "prompt": "hello", "seed": 7, "ignore_eos": True}
        self._ask |= {"max_tokens": num_tokens, "stream": True}
        self.outcomes = Counter[str]()
        self._is_over = False

    async def _one(self, client: httpx.AsyncClient, url: str, expected: str) -> str:
        try:
            answer = await client.post(f"{url}/v1/completions", json=self._ask)
        except httpx.TransportError:
            return "frontend lost"
        if answer.status_code == 503 or '"error"' in answer.text:
            return "worker lost"
        return "complete" if body_of(answer.text) == expected else f"wrong: {answer.text[-300:]}"

    async def _user(self, client: httpx.AsyncClient, number: int, expected: str) -> None:
        for turn in count(number):
            if self._is_over:
                return
            url = self._urls[turn % len(self._urls)]
            outcome = await self._one(client, url, expected)
            self.outcomes[outcome] += 1
            if outcome == "frontend lost":
                await asyncio.sleep(0.02)

    async def during(self, *, num_users: int, doing: Any) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            first = await client.post(f"{self._urls[0]}/v1/completions", json=self._ask)
            expected = body_of(first.text)
            users = [asyncio.create_task(self._user(client, i, expected)) for i in range(num_users)]
            try:
                await asyncio.to_thread(doing)
            finally:
                self._is_over = True
                await asyncio.gather(*users)


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)  # noqa: TID251 between two looks; the test's own timeout bounds it


# One a second. WALKAWAY_KILLS=60 makes it a minute: docs/engine.md has the command.
KILLS = int(os.environ.get("WALKAWAY_KILLS", "3"))
MINUTES = pytest.mark.timeout(120 + 4 * KILLS)


@TIERS
@MINUTES
def test_what_a_killed_frontend_had_is_free_within_a_heartbeat_and_others_go_on(
    flags: tuple[str, ...],
) -> None:
    with tiers(*STEP_MS, "--max-num-seqs", "32", *flags) as engine:
        at: list[int] = []

        def kill_again_and_again() -> None:
            pid = engine.ready["frontend_pids"][0]
            orphans = []
            for number in range(KILLS):
                ids = [f"orphan-{number}-{i}" for i in range(8)]
                with closing_all([post_raw(engine, name, stream=True) for name in ids]) as clients:
                    for client in clients:
                        read_until(client, b'"text"')
                    at.append(time.perf_counter_ns())
                    os.kill(pid, signal.SIGKILL)
                    restarted = engine.restarted()
                    assert (restarted["kind"], restarted["index"]) == ("frontend", 0)
                    pid = restarted["pid"]
                    time.sleep(max(0, 1 - (time.perf_counter_ns() - at[-1]) / 1e9))  # noqa: TID251
                orphans += ids

        staying = Users(engine.urls[1:], num_tokens=40)
        asyncio.run(staying.during(num_users=4, doing=kill_again_and_again))
        assert set(staying.outcomes) == {"complete"}, staying.outcomes
        wait_until(engine.is_idle)
        wait_until(engine.are_healthy)
        freed = defaultdict[str, dict[str, int]](dict)
        for url in engine.workers:
            for entry in engine.events(of=url):
                name, _, _ = entry["request_id"].rpartition("-req-")
                if entry["reason"] == "handed_over":
                    continue
                if entry["event"] == "blocks_freed" and name.startswith("frontend-0"):
                    assert entry["reason"] == "frontend_lost"
                    before = freed[name].get(entry["request_id"], 0)
                    freed[name][entry["request_id"]] = max(before, entry["t_ns"])
        lives = ["frontend-0", *(f"frontend-0.{life}" for life in range(2, KILLS + 1))]
        assert {name: len(times) for name, times in freed.items()} == dict.fromkeys(lives, 8)
        late = [max(freed[name].values()) - when for name, when in zip(lives, at, strict=True)]
        assert max(late) < HEARTBEAT_S * 1e9, late
        dropped = {"learned_by": "connection_dropped"}
        signals = "walkaway_worker_cancellations_total"
        assert engine.total(signals, of=engine.workers, **dropped) == 8 * KILLS
        assert (
            engine.total("walkaway_worker_aborted_requests_total", of=engine.workers) == 8 * KILLS
        )
        engine.check_integrity()


@contextmanager
def closing_all(clients: list[Any]) -> Iterator[list[Any]]:
    yield clients
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("kind", "migrates"),
    [("worker", True), ("worker", False), ("decode", False), ("prefill", True)],
)
@MINUTES
def test_a_killed_worker_takes_only_what_it_had(kind: str, *, migrates: bool) -> None:
    flags = ["--migrate", "100"] if migrates else []
    flags += ["--disaggregated"] if kind != "worker" else []
    first = 2 if kind == "prefill" else 0  # its place among the workers
    with tiers(*STEP_MS, "--max-num-seqs", "32", *flags) as engine:

        def kill_again_and_again() -> None:
            pids = list(engine.ready["worker_pids"])
            for number in range(KILLS):
                index = first + number % 2
                # Users all begin anew after a kill, and may be between two answers at the next.
                ids = [f"open-{number}-{i}" for i in range(8)]
                with closing_all([post_raw(engine, name, stream=True) for name in ids]) as clients:
                    for client in clients:
                        read_until(client, b'"text"')
                    os.kill(pids[index], signal.SIGKILL)
                    restarted = engine.restarted()
                assert (restarted["kind"], restarted["index"]) == ("worker", index)
                pids[index] = restarted["pid"]
                wait_until(engine.are_healthy)

        users = Users(engine.urls, num_tokens=40)
        asyncio.run(users.during(num_users=8, doing=kill_again_and_again))
        lost = {"worker lost"} if not migrates else set()
        assert {"complete"} <= set(users.outcomes) <= {"complete"} | lost, users.outcomes
        assert users.outcomes["worker lost"] <= 8 * KILLS
        wait_until(engine.is_idle)
        failed = list[dict[str, Any]]()
        for url in engine.urls:
            entries = engine.events(of=url)
            finished = [e for e in entries if e["event"] == "finished"]
            ends = Counter(e["request_id"] for e in finished)
            assert set(ends.values()) == {1}
            failed += [e for e in finished if e["reason"] == "error"]
            for name in ("num_requests_running", "kv_cache_usage_perc"):
                assert engine.metric(f"vllm:{name}", of=url) == 0
        moved = [e for u in engine.urls for e in engine.events(of=u) if e["event"] == "migrated"]
        assert bool(moved) is migrates
        assert bool(failed) is not migrates
        engine.check_integrity()


def test_a_killed_launcher_leaves_no_process_behind() -> None:
    engine = Tiers(*TWO_BY_TWO, *STEP_MS)
    children = psutil.Process(engine.process.pid).children(recursive=True)
    assert len(children) == 4
    with post_raw(engine, "orphan", stream=True) as client:
        read_until(client, b'"text"')
        engine.process.kill()
        _, left = psutil.wait_procs(children, timeout=10)
        assert not left
    engine.stop()


def test_a_worker_that_cannot_load_again_says_so_once(tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.jsonl"
    teacher.write_text('{"prompt": "hello", "text": "world"}\n')
    engine = Tiers(*TWO_BY_TWO, *STEP_MS, "--teacher", str(teacher), stderr=subprocess.PIPE)
    teacher.unlink()
    os.kill(engine.ready["worker_pids"][0], signal.SIGKILL)
    assert engine.restarted()["kind"] == "worker"
    assert engine.process.stderr is not None
    lines = iter(engine.process.stderr.readline, b"")
    why = f"worker: worker-0 cannot load, and serves no frontend: --teacher {teacher}: No such"
    assert any(line.startswith(why.encode()) for line in lines)
    assert not engine.are_healthy()
    ask = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
    answers = [httpx.post(f"{url}/v1/completions", json=ask) for url in engine.urls]
    assert [answer.status_code for answer in answers] == [200, 200], "worker-1 is there"
    assert engine.stop() == 0
    assert b"cannot load" not in engine.process.stderr.read()
    engine.process.stderr.close()


def test_a_worker_that_dies_during_the_start_ends_it_with_a_reason() -> None:
    command = [sys.executable, "-m", "reference_engine", *TWO_BY_TWO, *STEP_MS, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        ours = psutil.Process(launcher.pid)
        wait_until(lambda: len(ours.children()) == 3)  # two workers, and the first frontend
        children = ours.children()
        min(children, key=psutil.Process.create_time).kill()
        said = launcher.communicate(timeout=30)[1].decode()
    assert launcher.returncode == 1
    assert "the worker process has ended (killed by SIGKILL)" in said
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left


def test_a_second_signal_ends_the_draining() -> None:
    engine = Tiers(*TWO_BY_TWO, *STEP_MS, "--shutdown", "drain")
    children = psutil.Process(engine.process.pid).children(recursive=True)
    with post_raw(engine, "long", stream=True) as client:
        read_until(client, b'"text"')
        engine.process.send_signal(signal.SIGINT)
        wait_until(lambda: httpx.get(f"{engine.url}/health").status_code == 503)
        engine.process.send_signal(signal.SIGTERM)
        assert b"server_shutdown" in read_until(client, b"[DONE]")
    assert engine.process.wait(20) == 130
    _, left = psutil.wait_procs(children, timeout=10)
    assert not left
    engine.stop()


def test_a_frontend_elsewhere_calls_workers_by_their_addresses_and_a_secret() -> None:
    secret = {**os.environ, "SECRET": "sesame"}
    command = [sys.executable, "-m", "reference_engine", "--exit-with-stdin"]

    def start(*more: str, stderr: int | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, "--secret-env", "SECRET", *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=secret,
        )

    sizes = ("--num-blocks", "300", "--max-num-seqs", "5", "--max-model-len", "1024", *STEP_MS)
    lone = [start("--worker-listen", "127.0.0.1:0", "--name", name, *sizes) for name in ("x", "y")]
    listening = [json.loads(one.stdout.readline()) for one in lone if one.stdout]
    assert [line["name"] for line in listening] == ["x", "y"]
    at = ",".join(line["worker"] for line in listening)
    frontend = start("--connect", at, "--port", "0", "--name", "far")
    assert frontend.stdout is not None
    url = json.loads(frontend.stdout.readline())["url"]
    ask = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
    ids = [httpx.post(f"{url}/v1/completions", json=ask).json()["id"] for _ in range(2)]
    assert ids == ["cmpl-far-0-req-1", "cmpl-far-0-req-2"]
    config = httpx.get(f"{url}/walkaway/config").json()
    assert config["workers"].keys() == {"x", "y"}
    served = [config[name] for name in ("runner", "num_blocks", "max_num_seqs", "max_model_len")]
    assert served == ["simulated", 300, 5, 1024], "the workers' settings: it was given none"
    contrary = start("--connect", at, "--num-blocks", "400", stderr=subprocess.PIPE)
    assert contrary.wait(20) == 2
    assert contrary.communicate() == (
        "",
        "walkaway engine: x serves with --num-blocks 300, and this frontend was given "
        "--num-blocks 400: give both the same\n",
    )
    stranger = start("--connect", at, "--port", "0", "--secret-env", "PATH")
    assert stranger.wait(20) == 2, "its secret is wrong"
    assert stranger.communicate()[0] == ""
    for process in (frontend, *lone):
        with process:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(20) == 0


@TIERS
@pytest.mark.slow
def test_a_migrated_answer_of_the_model_is_the_unbroken_one(flags: tuple[str, ...]) -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    flags += ("--device", "cpu", "--num-blocks", "256", "--max-model-len", "512")
    ask = {"prompt": "hello", "max_tokens": 300, "temperature": 0, "stream": True}
    with tiers(*flags, "--migrate", "1") as engine:
        texts = []
        for name in ("unbroken", "migrated"):
            with post_raw(engine, name, **ask, stream_options={"include_usage": True}) as client:
                said = read_until(client, b'"text"')
                if name == "migrated":
                    mine = [e for e in engine.events() if e["client_request_id"] == name]
                    [number] = {int(entry["worker"][-1]) for entry in mine}
                    os.kill(engine.ready["worker_pids"][number], signal.SIGKILL)
                said += read_until(client, b"[DONE]")
            assert b'"completion_tokens":300' in said
            pieces = [
                json.loads(line[6:])["choices"] for line in said.split(b"\n") if b'"text"' in line
            ]
            texts.append("".join(choices[0]["text"] for choices in pieces))
        assert engine.order("migrated").count("migrated") == 1
        assert engine.restarted()["kind"] == "worker"
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["worker", "decode", "frontend"])
def test_a_silent_process_is_taken_for_lost_and_comes_back(kind: str) -> None:
    """Another worker continues the answer, which is whole in the end. A frontend that wakes finds
    its connections lost, one after the other.
    """
    flags = [*STEP_MS, "--peer-timeout-s", "1", "--migrate", "2"]
    flags += ["--disaggregated"] if kind == "decode" else []
    with tiers(*flags) as engine, post_raw(engine, "long", stream=True, max_tokens=500) as client:
        read_until(client, b'"text"')
        entries = [e for e in engine.events() if e["event"] == "first_token"]
        index = 0 if kind == "frontend" else int(entries[0]["worker"][-1])
        pid = engine.ready["frontend_pids" if kind == "frontend" else "worker_pids"][index]
        os.kill(pid, signal.SIGSTOP)
        if kind != "frontend":
            wait_until(lambda: "migrated" in engine.order("long"))
        else:
            silent = {"learned_by": "heartbeat_timeout"}
            name = "walkaway_worker_cancellations_total"
            wait_until(lambda: engine.total(name, of=engine.workers, **silent) == 1)
            assert engine.is_idle(), "what a silent frontend had is free"
        os.kill(pid, signal.SIGCONT)
        assert b'"finish_reason":"length"' in read_until(client, b"[DONE]")
        assert engine.order("long").count("migrated") <= (2 if kind == "frontend" else 1)
        wait_until(engine.are_healthy)
        wait_until(engine.is_idle)
        engine.check_integrity()
