"""A patched process whose streams leave when another greenlet says so: plan.json as argument,
scenarios on standard input, their rows on standard output."""

from gevent import monkey

monkey.patch_all()

import json
import sys
from pathlib import Path
from typing import Any

import gevent
import msgspec

from harness.client.live_stream import Drain, LiveStream, join_all
from harness.client.session import LoadSession
from harness.records import Delivery, Protocol, Way
from harness.workload.abandon import RequestSpec
from harness.workload.plan import read_plan

LONG_S = 30.0


def play(session: LoadSession, scenario: dict[str, Any]) -> LiveStream:
    way = Way(scenario["way"])
    stream = LiveStream(
        session,
        RequestSpec(
            user=0,
            max_tokens=scenario["max_tokens"],
            prompt_tokens=scenario.get("prompt_tokens", 8),
            delivery=Delivery(scenario.get("delivery", "stream")),
            way=way if scenario.get("is_planned") else None,
        ),
    )
    if (wait_s := scenario.get("wait_s")) is not None:
        gevent.sleep(wait_s)
    if tokens := scenario.get("tokens"):
        assert stream.wait_tokens(tokens, LONG_S)
        assert stream.first_token_ns is not None
    assert not stream.wait_tokens(100, 0.01)
    assert stream.row is None
    stream.leave(None if scenario.get("is_planned") else way)
    assert stream.join(LONG_S) is not None
    assert not stream.wait_tokens(100, LONG_S)  # it has ended, so this does not wait
    return stream


def hold(session: LoadSession, drain: Drain, scenario: dict[str, Any]) -> LiveStream:
    """The stream is drained, and leaves if it has not ended in this time."""
    stream = LiveStream(
        session, RequestSpec(user=0, max_tokens=scenario["max_tokens"], prompt_tokens=8)
    )
    assert stream.wait_tokens(1, LONG_S)
    drain.add(stream)
    if stream.join(scenario["leaves_after_s"]) is None:
        stream.leave()
        assert stream.join(LONG_S) is not None
    return stream


def read_first(session: LoadSession, scenario: dict[str, Any]) -> LiveStream:
    """The one of two that is not drained."""
    drain, spec = Drain(), RequestSpec(user=0, max_tokens=scenario["max_tokens"], prompt_tokens=8)
    both = [LiveStream(session, spec) for _ in range(2)]
    drain.add_later_ones(both, 1, LONG_S)
    assert None not in join_all(both, LONG_S)
    (read,) = set(both) - drain.taken
    return read


def main() -> None:
    plan = read_plan(Path(sys.argv[1]))
    if plan.protocol is Protocol.GRPC:
        from harness.client.kserve import use_gevent  # its packages are an extra

        use_gevent()
    session = LoadSession(
        plan, api_key=None, tell=lambda _row: None, enough=lambda: None, give_up=sys.exit
    )
    drain, rows = Drain(), []
    for scenario in json.load(sys.stdin):
        if "leaves_after_s" in scenario:
            rows.append(hold(session, drain, scenario).row)
        elif "is_first_read" in scenario:
            rows.append(read_first(session, scenario).row)
        else:
            rows.append(play(session, scenario).row)
    session.close()
    sys.stdout.buffer.write(msgspec.json.encode(rows))


if __name__ == "__main__":
    main()
