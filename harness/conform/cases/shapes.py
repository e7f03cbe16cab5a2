"""Connections that neither stay nor leave: half closed, unread for a while, silent."""

import time
from typing import Final

from harness.client.chunk import ABORT
from harness.client.live_stream import LiveStream
from harness.client.stream import ENDED_EARLY
from harness.conform.bench import Bench
from harness.conform.bystanders import (
    UNLIKE_TEXTS,
    Rows,
    UnlikeTextsError,
    compared,
    one_by_one,
    rows_of,
    start_greedy,
    wait_each,
)
from harness.conform.case import FREED, case, reports
from harness.conform.finding import Evidence, Finding
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import READY_S
from harness.formatting import quantity
from harness.records import Outcome, RequestRow, Way, WireClose
from harness.store.conform_result import Failure, Level

READ_TOKENS: Final = 8
HALF_CLOSED_TOKENS: Final = 40  # of an answer whose client has closed its sending side
STREAMS_OF_A_PAUSE: Final = 3  # its own, and two controls
LOOK_TOKENS: Final = 32  # of an answer that shows how many bytes a token takes
# A longer answer than these bytes lets a server see the stall: a kernel holds 50 kB for a
# client whose buffer and segments are the smallest, and servers hold up to 64 kB themselves.
STALLED_BYTES: Final = 128 << 10
STALLED_MARGIN: Final = 1.1
MOST_STALLED_S: Final = 20.0
SHORT_STALL_STEPS: Final = 20  # of a reader that then leaves
SIBLINGS: Final = 4
SIBLING_TOKENS: Final = 40
SILENT_STREAMS: Final = 2
SILENCE_TIMES: Final = 1.1  # times the wait, which their answers must outlast
UNDECLARED_TIMES: Final = 3  # times the settle time: the wait for a silent client
LOOK_S: Final = 1.0


@case(
    "shape/half-close",
    Level.MUST,
    "A client that closes only its sending side is answered or cancelled.",
    wire="After 8 tokens `shutdown(SHUT_WR)`: the server gets a FIN, and the client reads on. If "
    "the stream is cut, then the same behind full slots, as in stream/fin-decode.",
    passes=f"the answer comes whole; or the server closes too, and {FREED}",
    methods="W P",
    remedy="answer a half-closed client, or abort its request",
    why="HTTP allows it, and the FIN of a half-close looks like that of a leave. A server may take "
    "either view; a server that stops sending and keeps computing takes both.",
    needs=("http",),
    quick=True,
    caught=reports("antirez/ds4#707"),
)
def half_close(bench: Bench) -> Finding:
    stream = bench.start(bench.short(HALF_CLOSED_TOKENS))
    wait_each([stream], READ_TOKENS)
    stream.leave(Way.HALF_CLOSE)
    patience_s = bench.settle_s + 2 * HALF_CLOSED_TOKENS * bench.step_s
    row = stream.join(patience_s)
    if row is None:
        said = f"{patience_s:.1f} s after the half-close the answer has neither ended nor continued"
        return Finding(Failure.NEVER, said, {"waited_s": round(patience_s, 1)})
    if row.outcome is not Outcome.ABANDONED:
        raise CannotDecideError(f"the stream could not leave: {row.error or row.outcome}")
    came = row.tokens_read + (row.tokens_after_leaving or 0)
    evidence: Evidence = {"tokens": came, "finish_reason": row.finish_reason}
    is_whole = row.finish_reason is not None or came >= HALF_CLOSED_TOKENS  # some say no reason
    if is_whole and row.finish_reason != ABORT:
        return Finding(None, "a half-closed client is answered whole", evidence)
    if bench.known.never_stops is not None:  # the rest of that answer may still hold a slot
        bench.pause(HALF_CLOSED_TOKENS * bench.step_s)
    finding = bench.recoveries.find(leave=lambda leaver: leaver.leave(Way.HALF_CLOSE))
    said = f"the stream of a half-closed client is cut: {finding.reason}"
    return finding._replace(reason=said, evidence=finding.evidence | evidence)


@case(
    "shape/stall",
    Level.MUST,
    "A reader that pauses loses nothing, and is let go when it closes.",
    wire="A client with the smallest receive buffer asks for 128 KiB, reads 8 tokens, nothing for "
    "as long as the whole answer takes, and then the rest. Another reads nothing for 20 steps and "
    "closes, behind full slots.",
    passes=f"the text is whole, or the stream is broken off with an error; {FREED}",
    methods="W P",
    remedy="keep what a slow reader has not read, and watch its connection meanwhile",
    why="A phone in a tunnel. A server that drops what it cannot send mends the gap silently; one "
    "that waits in a write does not see the close.",
    needs=("http",),
    caught=reports("Neroued/ninfer#111 sysid/sse-starlette#89 BerriAI/litellm#30244"),
)
def stall(bench: Bench) -> Finding:
    tokens = _tokens_of_a_stall(bench)
    runs_together = bench.crowd(STREAMS_OF_A_PAUSE) == STREAMS_OF_A_PAUSE
    most_s = MOST_STALLED_S if runs_together else MOST_STALLED_S / 2
    is_seen = tokens * bench.step_s <= most_s
    if is_seen and (harm := _pause(bench, tokens, runs_together=runs_together)) is not None:
        if _pause(bench, tokens, runs_together=runs_together) is None:
            raise CannotDecideError(f"{harm}, but not a second time")
        return Finding(Failure.HARM, harm, {})

    def stop(leaver: LiveStream, _number: int) -> None:
        leaver.wait_tokens(READ_TOKENS, READY_S)
        leaver.exchange.stall()
        bench.pause(SHORT_STALL_STEPS * bench.step_s)

    finding = bench.recoveries.find(
        bench.long(way=Way.STOP_READING), ready=stop, leave=lambda leaver: leaver.leave(Way.FIN)
    )
    if is_seen:
        return finding
    took = quantity(tokens * bench.step_s, "s")
    left_out = f"a longer pause is not judged: an answer that no buffer holds takes {took}"
    return finding._replace(reason=f"{finding.reason}; {left_out}")


def _tokens_of_a_stall(bench: Bench) -> int:
    """How many tokens an answer must have so that no buffer on its way holds it."""
    (look,) = start_greedy(bench, [1], LOOK_TOKENS)
    rows_of([look])
    bytes_a_token = max(1, look.exchange.bytes_read) / LOOK_TOKENS
    return 1 + int(STALLED_BYTES / bytes_a_token * STALLED_MARGIN)


def _pause(bench: Bench, tokens: int, *, runs_together: bool) -> str | None:
    """A greedy answer is read with a pause. Returns what is wrong with its text; None: nothing.
    `runs_together`: its controls run at the same time."""
    room = (bench.facts.context or 1 << 20) - 4 * bench.short().prompt_tokens
    asked = max(LOOK_TOKENS, min(tokens, room))
    before = [] if runs_together else one_by_one(bench, [1, 1], asked)
    controls = start_greedy(bench, [1, 1], asked) if runs_together else []
    (paused,) = start_greedy(bench, [1], asked, way=Way.STOP_READING)
    wait_each([paused], READ_TOKENS)
    paused.exchange.stall()
    if before:
        bench.pause((before[0].ended_ns - before[0].sent_ns) / 1e9)
    first, second = before or rows_of(controls)
    read_before = paused.exchange.bytes_read
    paused.exchange.resume()
    (row,) = rows_of([paused])
    return judge_pause(first, second, row, paused.exchange.bytes_read - read_before)


def judge_pause(
    first: RequestRow, second: RequestRow, paused: RequestRow, late_bytes: int
) -> str | None:
    """`late_bytes`: read after the pause. A text that is whole says nothing if buffers held it.
    Where texts vary of themselves, their tokens are compared."""
    seen = _text_of if first.answer == second.answer else _tokens_of
    if first.outcome is not Outcome.COMPLETED or seen(first) != seen(second):
        raise CannotDecideError("two greedy answers without a pause differ, in their lengths, too")
    if paused.outcome is not Outcome.COMPLETED:
        return "the stream was cut without an error" if paused.error == ENDED_EARLY else None
    if seen(paused) != seen(first) and _length_of(paused) != _length_of(first):
        return (
            f"of {len(first.answer or '')} characters {len(paused.answer or '')} came, and the "
            "stream ended as if nothing were missing"
        )
    if late_bytes < STALLED_BYTES:
        raise CannotDecideError(
            f"only {late_bytes} bytes came after the pause: the buffers between may have held "
            f"them, and the server saw no pause (a longer context; {STALLED_BYTES} are enough)"
        )
    return None


def _text_of(row: RequestRow) -> str | None:
    return row.answer


def _tokens_of(row: RequestRow) -> int:
    return row.completion_tokens or row.tokens_read


def _length_of(row: RequestRow) -> tuple[int, int]:
    """Another text of this length has lost nothing: the batch may have changed it."""
    return len(row.answer or ""), row.tokens_read


@case(
    "h2/rst-one",
    Level.MUST,
    "RST_STREAM ends one stream of an HTTP/2 connection.",
    wire="Four streams on one connection; RST_STREAM with CANCEL on one of them, or, in the "
    "control, its end. Both again if a greedy text of the others differs. Then the same behind "
    "full slots, where all requests go over HTTP/2, four on a connection.",
    passes=f"the other three are answered whole, with the text of the control; {FREED}",
    methods="P B",
    remedy="take RST_STREAM as the end of one request",
    why="On HTTP/2 a closed tab closes no connection. A server that watches connections sees "
    "nothing; one that takes the reset for a broken connection ends the neighbours.",
    needs=("http",),
    caught=reports("emmett-framework/granian#917"),
)
def rst_one(bench: Bench) -> Finding:
    with bench.over_http2():
        try:
            beside = compared(
                lambda: _siblings(bench, leaves=False),
                lambda: _siblings(bench, leaves=True),
                alone=lambda: one_by_one(bench, range(1, SIBLINGS), SIBLING_TOKENS),
                settle=bench.cleaning.rest,
            )
        except UnlikeTextsError:  # all were whole
            freed = bench.recoveries.find()
            return freed._replace(reason=f"{freed.reason}; {UNLIKE_TEXTS}")
        return bench.recoveries.find() if beside.failure is None else beside


def _siblings(bench: Bench, *, leaves: bool) -> Rows:
    """In the control the first stream ends where it would be reset: the batch gets as small."""
    first = bench.start(bench.short(SIBLING_TOKENS if leaves else READ_TOKENS + 1))
    streams = start_greedy(bench, range(1, SIBLINGS), SIBLING_TOKENS)
    wait_each([first, *streams], READ_TOKENS)
    if leaves:
        first.leave()
    return rows_of(streams)


@case(
    "shape/vanish",
    Level.SHOULD,
    "A client that falls silent is let go within a stated time.",
    wire="Two streams read 8 tokens; then all packets of their connections are dropped before the "
    "kernel acknowledges them, and nothing is sent. Each second as many probes as slots start at "
    "once.",
    passes="no slot is held after the time that the target's file declares (`silence_s`); without "
    "it the reason says the time",
    methods="O",
    remedy="set a time limit for clients that acknowledge nothing",
    why="A laptop that is shut sends no FIN. Without a time limit of the server's own, the request "
    "runs to its end, and the kernel gives up after 15 minutes.",
    needs=("http", "drop_packets"),
    caught=reports("sysid/sse-starlette#173 Neroued/ninfer#184"),
)
def vanish(bench: Bench) -> Finding:
    declared_s = bench.session.plan.target.silence_s
    longest_s = UNDECLARED_TIMES * bench.settle_s if declared_s is None else declared_s + LOOK_S
    tokens = int(SILENCE_TIMES * longest_s / bench.step_s)
    prompt = bench.short().prompt_tokens
    room = (bench.facts.context or tokens + prompt) - 2 * prompt
    if min(tokens, room) * bench.step_s < longest_s:
        raise CannotDecideError(f"an answer of {room} tokens ends before {longest_s:.0f} s")
    silent = bench.crowd(SILENT_STREAMS)
    streams = [bench.start(bench.short(min(tokens, room))) for _ in range(silent)]
    wait_each(streams, READ_TOKENS)
    for stream in streams:
        stream.leave(Way.VANISH)
    if any(row.wire_close is not WireClose.SILENCE for row in rows_of(streams)):
        raise CannotDecideError("this machine gives no right to drop packets")
    began_s = time.perf_counter()
    while (count := bench.held.at_once()).held and _since(began_s) < longest_s:
        bench.pause(min(LOOK_S, max(0.0, longest_s - _since(began_s))))
    waited_s, held = _since(began_s), count.held
    evidence: Evidence = {"held": held, "waited_s": round(waited_s, 1), "declared_s": declared_s}
    if declared_s is None:
        said = f"held for more than {waited_s:.0f} s" if held else f"let go within {waited_s:.1f} s"
        said = f"silent clients are {said}"
        return Finding(None, said, evidence, is_judged=False, way=count.way)
    if held:
        said = f"{waited_s:.0f} s after its clients fell silent {count.said}"
        said = f"{said}; {declared_s:g} s are declared"
        return Finding(Failure.NEVER, said, evidence, way=count.way)
    said = f"silent clients were let go within {waited_s:.1f} s"
    return Finding(None, said, evidence, way=count.way)


def _since(began_s: float) -> float:
    return time.perf_counter() - began_s
