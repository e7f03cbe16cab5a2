"""Connections that neither stay nor leave: half closed, unread for a while, silent."""

import time
from typing import Final

from harness.conform.bench import Bench
from harness.conform.case import CannotDecideError, Evidence, Finding, case, reports
from harness.load.live import LiveStream
from harness.load.session import canary_prompt
from harness.load.stream import ENDED_EARLY
from harness.records import Outcome, RequestRow, Role, Way, WireClose
from harness.store.conform_result import Failure, Level

READ_TOKENS: Final = 8
READY_S: Final = 20.0
HALF_CLOSED_TOKENS: Final = 40  # of an answer whose client has closed its sending side
STALLED_TOKENS: Final = 90
STALLED_STEPS: Final = 50
SHORT_STALL_STEPS: Final = 20  # of a reader that then leaves
PROMPT_TOKENS: Final = 24
SIBLINGS: Final = 4
SILENT_STREAMS: Final = 2
SILENCE_TIMES: Final = 2  # the declared time, which their answers must at least take
UNDECLARED_TIMES: Final = 3  # the settle time: how long a silent client is waited for
LOOK_S: Final = 1.0


@case(
    "shape/half-close",
    Level.MUST,
    "A client that closes only its sending side is answered or cancelled.",
    wire="After 8 tokens `shutdown(SHUT_WR)`: the server gets a FIN, and the client reads on. If "
    "the stream is cut, then the same behind full slots, as in stream/fin-decode.",
    passes="the answer comes whole; or the server closes too, and the queued request's first token "
    "comes at most 4 steps later at the median of the tries, and at most 12 in each",
    methods="W P",
    why="HTTP allows it and a FIN does not tell the two apart. A server may take either view; one "
    "that stops to send and goes on to compute takes both.",
    needs=("http",),
    quick=True,
    caught=reports("antirez/ds4#707"),
)
def half_close(bench: Bench) -> Finding:
    stream = bench.start(bench.short(HALF_CLOSED_TOKENS))
    if not stream.wait_tokens(READ_TOKENS, READY_S):
        raise CannotDecideError(f"a stream did not get {READ_TOKENS} tokens")
    stream.leave(Way.HALF_CLOSE)
    patience_s = bench.settle_s + 2 * HALF_CLOSED_TOKENS * bench.step_s
    row = stream.join(patience_s)
    if row is None:
        said = f"{patience_s:.1f} s after the half-close the answer has neither ended nor gone on"
        return Finding(Failure.NEVER, said, {"waited_s": round(patience_s, 1)})
    if row.outcome is not Outcome.ABANDONED:
        raise CannotDecideError(f"the stream could not leave: {row.error or row.outcome}")
    came = row.tokens_read + (row.tokens_after_leaving or 0)
    evidence: Evidence = {"tokens": came, "asked": HALF_CLOSED_TOKENS}
    if came >= HALF_CLOSED_TOKENS:
        return Finding(None, "a half-closed client is answered whole", evidence)
    finding = bench.recovery(leave=lambda leaver: leaver.leave(Way.HALF_CLOSE))
    said = f"the stream of a half-closed client is cut: {finding.reason}"
    return finding._replace(reason=said, evidence=finding.evidence | evidence)


@case(
    "shape/stall",
    Level.MUST,
    "A reader that pauses loses nothing, and is let go when it closes.",
    wire="A client with the smallest receive buffer reads 8 tokens, nothing for 50 steps, and then "
    "the rest. Another reads nothing for 20 steps and closes, behind full slots.",
    passes="the text is whole, or the stream is broken off with an error; the queued request's "
    "first token comes at most 4 steps later at the median of the tries, and at most 12 in each",
    methods="W P",
    why="A phone in a tunnel. A server that drops what it cannot send mends the gap silently; one "
    "that waits in a write does not see the close.",
    needs=("http",),
    caught=reports("Neroued/ninfer#111 sysid/sse-starlette#89 BerriAI/litellm#30244"),
)
def stall(bench: Bench) -> Finding:
    harm = _judge_text(*_pause(bench))
    if harm is not None:
        return Finding(Failure.HARM, harm, {"stalled_steps": STALLED_STEPS})

    def stop(leaver: LiveStream, _number: int) -> None:
        leaver.wait_tokens(READ_TOKENS, READY_S)
        leaver.stall()
        bench.pause(SHORT_STALL_STEPS * bench.step_s)

    return bench.recovery(
        bench.long(way=Way.STOP_READING), ready=stop, leave=lambda leaver: leaver.leave(Way.FIN)
    )


def _pause(bench: Bench) -> tuple[RequestRow, RequestRow, RequestRow]:
    """Two greedy answers read without a pause, and one with."""
    scale = bench.session.plan.prompt_scale
    text = canary_prompt(1, tokens=PROMPT_TOKENS, scale=scale)
    asked = {"role": Role.CANARY, "max_tokens": STALLED_TOKENS}
    paused = bench.start(bench.long(way=Way.STOP_READING, **asked), text)
    controls = [bench.start(bench.long(**asked), text) for _ in range(2)]
    if not paused.wait_tokens(READ_TOKENS, READY_S):
        raise CannotDecideError(f"a stream did not get {READ_TOKENS} tokens")
    paused.stall()
    bench.pause(STALLED_STEPS * bench.step_s)
    paused.resume()
    first, second, row = (stream.join(READY_S) for stream in (*controls, paused))
    if first is None or second is None or row is None:
        raise CannotDecideError(f"a stream had not ended after {READY_S:g} s")
    return first, second, row


def _judge_text(first: RequestRow, second: RequestRow, paused: RequestRow) -> str | None:
    """What is wrong with the text of the one that paused."""
    if first.outcome is not Outcome.COMPLETED or first.answer != second.answer:
        raise CannotDecideError("two greedy answers without a pause differ")
    if paused.outcome is Outcome.COMPLETED:
        if paused.answer == first.answer:
            return None
        return (
            f"of {len(first.answer or '')} characters {len(paused.answer or '')} came, and the "
            "stream ended as if nothing were missing"
        )
    return "the stream was cut without an error" if paused.error == ENDED_EARLY else None


@case(
    "h2/rst-one",
    Level.MUST,
    "RST_STREAM ends one stream of an HTTP/2 connection.",
    wire="Four greedy streams on one connection; RST_STREAM with CANCEL on one of them. Then, all "
    "requests over HTTP/2, four on a connection, the same behind full slots.",
    passes="the other three are answered whole, with the text of the control; the queued request's "
    "first token comes at most 4 steps later at the median of the tries, and at most 12 in each",
    methods="P B",
    why="On HTTP/2 a closed tab closes no connection. A server that watches connections sees "
    "nothing; one that takes the reset for a broken connection ends the neighbours.",
    needs=("http",),
    caught=reports("emmett-framework/granian#917"),
)
def rst_one(bench: Bench) -> Finding:
    with bench.over_http2():
        control, siblings = _four(bench, leaves=False)[1:], _four(bench, leaves=True)[1:]
        harm = _judge_siblings(control, siblings)
        if harm is not None:
            return Finding(Failure.HARM, harm, {"streams": SIBLINGS})
        return bench.recovery()


def _four(bench: Bench, *, leaves: bool) -> list[RequestRow]:
    scale = bench.session.plan.prompt_scale
    asked = bench.short(HALF_CLOSED_TOKENS, role=Role.CANARY)
    streams = [
        bench.start(asked, canary_prompt(number, tokens=PROMPT_TOKENS, scale=scale))
        for number in range(SIBLINGS)
    ]
    for stream in streams:
        if not stream.wait_tokens(READ_TOKENS, READY_S):
            raise CannotDecideError(f"{SIBLINGS} streams do not run on one connection")
    if leaves:
        streams[0].leave()
    rows = [stream.join(READY_S) for stream in streams]
    if None in rows:
        raise CannotDecideError(f"a stream had not ended after {READY_S:g} s")
    return [row for row in rows if row is not None]


def _judge_siblings(control: list[RequestRow], siblings: list[RequestRow]) -> str | None:
    if any(row.outcome is not Outcome.COMPLETED for row in control):
        raise CannotDecideError("a stream of the control was not answered whole")
    for row in siblings:
        if row.outcome is not Outcome.COMPLETED:
            return f"a stream beside the one that was reset ended: {row.error or row.outcome}"
    if [row.answer for row in siblings] != [row.answer for row in control]:
        return "the text of a stream beside the one that was reset has changed"
    return None


@case(
    "shape/vanish",
    Level.SHOULD,
    "A client that falls silent is let go within a stated time.",
    wire="Two streams read 8 tokens; then all packets of theirs are dropped before the kernel "
    "acknowledges them, and nothing is sent. Each second as many probes as slots start at once.",
    passes="no slot is held after the time that the target's file declares (`silence_s`); without "
    "one the time is told",
    methods="O",
    why="A laptop that is shut sends no FIN. Without a time limit of the server's own, the request "
    "runs to its end, and the kernel gives up after 15 minutes.",
    needs=("http", "drop_packets"),
    caught=reports("sysid/sse-starlette#173 Neroued/ninfer#184"),
)
def vanish(bench: Bench) -> Finding:
    declared_s = bench.session.plan.target.silence_s
    longest_s = UNDECLARED_TIMES * bench.settle_s if declared_s is None else declared_s + LOOK_S
    tokens = int(SILENCE_TIMES * longest_s / bench.step_s)
    room = (bench.facts.context or tokens + PROMPT_TOKENS) - 2 * PROMPT_TOKENS
    if min(tokens, room) * bench.step_s < longest_s:
        raise CannotDecideError(f"an answer of {room} tokens ends before {longest_s:.0f} s")
    streams = [bench.start(bench.short(min(tokens, room))) for _ in range(SILENT_STREAMS)]
    for stream in streams:
        if not stream.wait_tokens(READ_TOKENS, READY_S):
            raise CannotDecideError(f"a stream did not get {READ_TOKENS} tokens")
    for stream in streams:
        stream.leave(Way.VANISH)
    rows = [stream.join(READY_S) for stream in streams]
    if any(row is None or row.wire_close is not WireClose.SILENCE for row in rows):
        raise CannotDecideError("this machine gives no right to drop packets")
    began_s = time.perf_counter()
    while (held := bench.slots - bench.running_at_once()) and _since(began_s) < longest_s:
        bench.pause(LOOK_S)
    waited_s = _since(began_s)
    evidence: Evidence = {"held": held, "waited_s": round(waited_s, 1), "declared_s": declared_s}
    if declared_s is None:
        said = f"held for more than {waited_s:.0f} s" if held else f"let go within {waited_s:.1f} s"
        return Finding(None, f"silent clients are {said}", evidence, is_judged=False)
    if held:
        said = f"{held} slots are held {waited_s:.0f} s after their clients fell silent"
        return Finding(Failure.NEVER, f"{said}; {declared_s:g} s are declared", evidence)
    return Finding(None, f"silent clients were let go within {waited_s:.1f} s", evidence)


def _since(began_s: float) -> float:
    return time.perf_counter() - began_s
