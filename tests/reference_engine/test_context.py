"""Contexts: what a stop and a kill reach, in which order, from any thread."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

from reference_engine.context import (
    Cancellation,
    CancelReason,
    Context,
    DetectionMethod,
    Signal,
)

WHY = Cancellation(CancelReason.API, DetectionMethod.NONE, 7)


def state(context: Context) -> tuple[bool, bool]:
    return context.is_stopped(), context.is_killed()


def test_exactly_one_of_many_threads_is_the_first_and_its_reason_stays() -> None:
    start = Barrier(8)

    def race(context: Context, mine: Cancellation) -> bool:
        start.wait()
        return context.stop(mine)

    reasons = list(CancelReason)
    with ThreadPoolExecutor(8) as threads:
        for _ in range(50):
            context, heard = Context(), list[Signal]()
            context.watch(lambda signal, _: heard.append(signal))  # noqa: B023 of this turn
            racers = [
                Cancellation(reasons[t_ns % len(reasons)], DetectionMethod.NONE, t_ns)
                for t_ns in range(8)
            ]
            won = threads.map(race, [context] * 8, racers)
            winners = [mine for mine, is_first in zip(racers, won, strict=True) if is_first]
            assert winners == [context.cancellation]
            assert heard == [Signal.STOP]


def test_a_stop_is_idempotent_and_a_kill_is_a_stop_too() -> None:
    context = Context("a")
    assert (context.id(), *state(context)) == ("a", False, False)
    assert context.stop_generating(WHY)
    assert state(context) == (True, False)
    assert not context.stop()
    assert state(context) == (True, False)
    other = Cancellation(CancelReason.CLIENT_TIMEOUT, DetectionMethod.NONE, 8)
    assert context.kill(other)
    assert state(context) == (True, True)
    assert not context.kill()
    assert not context.stop()
    assert context.cancellation == WHY


def test_both_signals_reach_children_in_link_order_and_all_their_children() -> None:
    heard = list[tuple[str, Signal]]()

    def note(name: str, signal: Signal, why: Cancellation | None) -> None:
        assert why == WHY
        heard.append((name, signal))

    parent, first, second, leaf = (Context(name) for name in ("parent", "1", "2", "leaf"))
    for child in (first, second, leaf):
        child.watch(partial(note, child.id()))
    parent.link_child(second)
    parent.link_child(first)
    parent.link_child(second)
    first.link_child(leaf)
    parent.stop(WHY)
    parent.kill()
    stops = [(name, Signal.STOP) for name in ("2", "1", "leaf")]
    kills = [(name, Signal.KILL) for name in ("2", "1", "leaf")]
    assert heard == [*stops, *kills]
    assert {state(child) for child in (first, second, leaf)} == {(True, True)}


def test_a_child_that_is_linked_late_learns_at_once_and_an_unlinked_one_nothing() -> None:
    parent, late, former = Context(), Context(), Context()
    parent.link_child(former)
    parent.unlink_child(former)
    parent.unlink_child(former)
    parent.kill(WHY)
    parent.link_child(late)
    assert state(late) == (True, True)
    assert late.cancellation == WHY
    assert state(former) == (False, False)
    assert state(parent.detached("x")) == (False, False)


def test_a_circle_of_contexts_ends() -> None:
    a, b = Context(), Context()
    a.link_child(b)
    b.link_child(a)
    a.stop()
    assert state(a) == state(b) == (True, False)


def test_a_stop_from_another_thread_wakes_whatever_awaits_it() -> None:
    async def main() -> None:
        context = Context()
        both, killed = context.async_killed_or_stopped(), context.killed()
        given_up = context.stopped()
        given_up.cancel()
        await asyncio.to_thread(context.stop)
        assert await both is True
        assert not killed.done()
        await asyncio.to_thread(context.kill)
        assert await killed is True
        assert await context.stopped() is True  # after the fact

    asyncio.run(main())


def test_a_loop_that_has_ended_does_not_disturb_a_cancel() -> None:
    context = Context()

    async def wait_in_vain() -> None:
        context.stopped()

    asyncio.run(wait_in_vain())
    assert context.stop()
