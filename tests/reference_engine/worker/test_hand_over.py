"""Prefill and decode workers as processes, behind frontends that are made up."""

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, Self

import msgspec
import pytest
from msgspec.structs import replace

from reference_engine.config import EngineConfig, StepCost
from reference_engine.context import CancelReason
from reference_engine.core.request import Sampling
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    FromWorker,
    HandedOver,
    KVBlocks,
    Ready,
    StepReport,
)
from reference_engine.wire import Beats, Hello, decode_payload, encode_frame
from reference_engine.worker.peer import Peer
from tests.reference_engine.worker.test_frontends import SECRET
from tests.reference_engine.worker.test_service import RunningWorker, running

CONFIG = EngineConfig(
    runner="simulated",
    max_num_seqs=4,
    num_blocks=64,
    block_size=4,
    max_model_len=64,
    max_num_batched_tokens=16,
    step_cost=StepCost(fixed_s=0.002),
)


class Frontend:
    """Remembers what its worker sends, and cancels a request when its `cue` comes: an event, with
    the first letter of the worker that notes it.
    """

    def __init__(self, name: str, worker: RunningWorker) -> None:
        self._peer = Peer(socket.create_connection(worker.address), Beats())
        self._decoder = msgspec.msgpack.Decoder[FromWorker](FromWorker)
        self._changed = threading.Condition()
        self.texts: dict[str, str] = defaultdict(str)
        self.ends: dict[str, str] = {}
        self.reasons: dict[str, dict[str, str | None]] = defaultdict(dict)
        self.events: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self.cues: dict[str, str] = {}
        self.latest: dict[str, StepReport] = {}
        self.is_ready = self.is_lost = False
        self._peer.send(encode_frame(Hello(peer=name, secret=SECRET)))
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.until(lambda: self.is_ready)

    def send(self, message: AddRequest | KVBlocks, cue: str | None = None) -> None:
        if cue is not None:
            self.cues[message.request_id] = cue
        self._peer.send(encode_frame(message))
        if cue == "at once":
            self.abort(message.request_id)

    def abort(self, name: str) -> None:
        abort = AbortRequest(request_id=name, reason=CancelReason.USER_DISCONNECT)
        self._peer.send(encode_frame(abort))

    def until(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, 60)

    def until_idle(self) -> None:
        self.until(lambda: all(is_idle(report) for report in self.latest.values()))

    def until_ended(self, number: int) -> None:
        self.until(lambda: len(self.ends) >= number)

    def _read(self) -> None:
        while (payloads := self._receive()) is not None:
            with self._changed:
                for payload in payloads:
                    self._hear(decode_payload(self._decoder, payload))
                self._changed.notify_all()
        with self._changed:
            self.is_lost = True
            self._changed.notify_all()

    def _receive(self) -> list[bytes] | None:
        try:
            return self._peer.receive()
        except OSError:
            return None

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, Ready):
            self.is_ready = True
        if isinstance(message, StepReport):
            self.latest[message.worker] = message
            for event in message.events:
                name, what = event.request_id, f"{message.worker[0]} {event.event}"
                self.events[name].append((message.worker, event.event))
                self.reasons[name][event.event] = event.reason
                if self.cues.get(name) == what:
                    self.abort(name)
            for output in message.outputs:
                assert output.request_id not in self.ends, "an output after the end"
                self.texts[output.request_id] += output.text
                if output.ending is not None:
                    self.ends[output.request_id] = output.ending.finish_reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._peer.close()
        self._thread.join(10)


def is_idle(report: StepReport) -> bool:
    held = report.num_running, report.num_waiting, report.host_blocks
    return (*held, report.free_blocks) == (0, 0, 0, CONFIG.num_blocks)


def add(request_id: str, seed: int, *, least: int = 2, **sampling: Any) -> AddRequest:
    random = Random(seed)
    prompt = [random.randrange(300, 2000) for _ in range(random.randrange(least, least + 28))]
    settings: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "seed": seed} | sampling
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=Sampling(**settings))


def decode_settings(number: int = 0, **settings: Any) -> dict[str, Any]:
    config = replace(CONFIG, component="decode", **settings)
    return {"name": f"decode-{number}", "config": config}


def prefill_settings(decode: RunningWorker, number: int = 0, **settings: Any) -> dict[str, Any]:
    config = replace(CONFIG, component="prefill", **settings)
    return {"name": f"prefill-{number}", "config": config, "decode_worker": decode.address}


@contextmanager
def chain(number: int = 0, **decode: Any) -> Iterator[tuple[RunningWorker, RunningWorker]]:
    with running(**decode_settings(number, **decode)) as behind:
        model = {key: one for key, one in decode.items() if key != "step_cost"}
        with running(**prefill_settings(behind, number, **model)) as first:
            yield first, behind


@pytest.mark.parametrize("runner", ["simulated", "torch"])
def test_a_chain_answers_as_one_worker_does(runner: str) -> None:
    """A second time with a stop string that begins in the first token and ends in the second."""
    model: dict[str, Any] = {"runner": runner}
    num_requests, least = 12, 2
    if runner == "torch":
        pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
        model |= {"device": "cpu", "batch_invariant": True, "num_blocks": 256, "max_model_len": 512}
        num_requests, least = 6, 300  # for the last one: over a MiB, so in two pieces
    alone = {"name": "worker-0", "config": replace(CONFIG, **model)}
    with running(**alone) as undivided, chain(**model) as (prefill, _):
        stops: list[tuple[str, ...]] = [()] * num_requests
        for name in ("f", "g"):
            with Frontend(name, undivided) as whole, Frontend(name, prefill) as divided:
                for side in (whole, divided):
                    for seed, stop in enumerate(stops):
                        last = {"least": least} if seed == num_requests - 1 else {}
                        side.send(add(f"r{seed}", seed, max_tokens=1 + seed, stop=stop, **last))
                    side.until_ended(num_requests)
            assert (divided.texts, divided.ends) == (whole.texts, whole.ends)
            assert {worker for worker, _ in divided.events["r0"]} == {"prefill-0"}, "one token"
            assert [what for _, what in divided.events["r5"]].count("taken_over") == 1
            assert ("stop" in whole.ends.values()) == bool(stops[0])
            stops = [(whole.texts[f"r{seed}"][2:12],) for seed in range(num_requests)]


CUES = (
    *("at once", "p admitted", "p first_token", "p handed_over", "p blocks_freed"),
    *("d taken_over", "d admitted", None),
)


def test_disconnects_at_any_moment_end_each_request_once_on_every_worker_that_had_it() -> None:
    """Two frontends, two chains; the decode workers' steps are long, so hand-overs take a while."""
    random, slow = Random(1), StepCost(fixed_s=0.006)
    with ExitStack() as stack:
        chains = [stack.enter_context(chain(at, step_cost=slow)) for at in (0, 1)]
        sides = [stack.enter_context(Frontend(f"f{at}", one)) for one, _ in chains for at in (0, 1)]
        for number in range(1000):
            cue, side = random.choice(CUES), sides[number % 4]
            side.send(add(f"r{number}", number, max_tokens=30 if cue else 9), cue)
            side.until_ended(number // 4 - 16)
        for side in sides:
            side.until_ended(250)
            side.until_idle()
        num_in_between = 0
        for at, workers in enumerate(chains):
            lives = [set(of) for side in sides[2 * at :][:2] for of in side.events.values()]
            assert sum(map(len, lives)) == sum(
                len(of) for side in sides[2 * at :][:2] for of in side.events.values()
            ), "no event twice"
            for by, worker in zip(("prefill", "decode"), workers, strict=True):
                name, counts = f"{by}-{at}", worker.metrics()
                tellers = {name, f"decode-{at}"}  # a cancel after the hand-over is noted there
                heard = [one for one in lives if "abort_received" in whats(one, tellers)]
                labels = " ".join(sorted([by, "dynamo", "generate"]))
                assert counts[f"dynamo_component_cancellation_total {labels}"] == len(heard)
                assert all(
                    "blocks_freed" in whats(one, {name}) for one in lives if whats(one, {name})
                )
                assert worker.is_whole()
            hands = [whats(one, {f"prefill-{at}"}) for one in lives]
            num_in_between += sum({"handed_over", "abort_received"} <= one for one in hands)
    assert num_in_between > 50, "cancelled while the blocks were on both workers"


def whats(life: set[tuple[str, str]], workers: set[str]) -> set[str]:
    return {what for by, what in life if by in workers}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_worker_that_is_killed_takes_its_chain_with_it_until_there_is_another(kind: str) -> None:
    """Requests are in all phases: waiting and running on both workers, and in between."""
    with chain(step_cost=StepCost(fixed_s=0.02)) as (prefill, decode):
        killed, other = (prefill, decode) if kind == "prefill" else (decode, prefill)
        with Frontend("f", prefill) as side:
            for number in range(40):
                side.send(add(f"r{number}", number, max_tokens=30))
            side.until_ended(1)
            assert side.latest["decode-0"].num_waiting > 0
            killed.kill()
            side.until(lambda: side.is_lost)
        with running(**killed.settings | {"port": killed.address[1]}):
            with Frontend("g", prefill) as again:
                again.send(add("r1", 1))
                again.until_ended(1)
                again.until_idle()
            assert other.is_whole()


def test_a_frontend_that_is_lost_loses_its_requests_on_both_workers_and_no_others() -> None:
    with chain() as (prefill, _), Frontend("other", prefill) as other:
        with Frontend("lost", prefill) as lost:
            for number in range(20):
                lost.send(add(f"lost-{number}", number, max_tokens=30))
                other.send(add(f"other-{number}", number, max_tokens=10))
            lost.until_ended(2)
        other.until_ended(20)
        other.until_idle()
        assert set(other.ends.values()) == {"length"}


@pytest.mark.parametrize(
    ("data", "is_cancelled"), [(b"0123456789", False), (b"01234", True)], ids=["others", "cut off"]
)
def test_blocks_that_do_not_fit_or_stay_away_cost_time_or_nothing(
    data: bytes, is_cancelled: bool
) -> None:
    """They are computed again; a cancellation does not wait for blocks still to come."""
    with running(**decode_settings()) as decode, Frontend("prefill-0", decode) as side:
        given = HandedOver(num_bytes=10, num_cached_tokens=3, probability=None)
        side.send(replace(add("a", 1), answer=[300], handed_over=given))
        side.send(KVBlocks(request_id="a", data=data))
        if is_cancelled:
            side.abort("a")
        side.until_ended(1)
        side.until_idle()
        assert side.ends["a"] == ("abort" if is_cancelled else "length")
        assert side.reasons["a"]["taken_over"] == "recompute"
