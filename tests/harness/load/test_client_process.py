"""A client whose process is killed, against a real server."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest

from harness.load.client_process import ClientProcess
from harness.records import Outcome, Way
from tests.harness.load.asking import after

if TYPE_CHECKING:
    from tests.harness.load.conftest import Connect, Script, ScriptedServer
    from tests.harness.load.conftest import Exchange as Played

    Serve = Callable[[Script], ScriptedServer]


class TestKilled:
    def test_what_the_process_had_read_counts(
        self, serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        leaves = threading.Event()

        class Process(ClientProcess):
            """It has read two more tokens when it is killed."""

            def kill(self) -> None:
                if not leaves.is_set():
                    leaves.set()
                    self.output.setblocking(True)
                    while b"last words" not in self.output.recv(65536, socket.MSG_PEEK):
                        """They are on their way."""
                super().kill()

        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert leaves.wait(30)
            x.token()
            x.token(text="last words")
            assert x.client_left_within(30)

        monkeypatch.setattr("harness.load.connection.ClientProcess", Process)
        row = connect(serve(script).url).ask(after(1), Way.KILLED)
        assert (row.outcome, row.tokens_read) == (Outcome.ABANDONED, 3)
        assert row.ended_ns < row.token_times_ns[1] <= row.token_times_ns[2]
        assert row.token_times_ns[2] <= time.perf_counter_ns()

    def test_no_process_is_left_behind(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            x.accept()
            x.stream(tokens=2, gap_s=0.001)

        client = connect(serve(script).url)
        assert client.ask(after(9), Way.KILLED).outcome is Outcome.COMPLETED
        assert client.ask(after(1), Way.KILLED).outcome in (Outcome.ABANDONED, Outcome.COMPLETED)
        assert [p for p in psutil.Process().children() if p.name() == "cat"] == []

    def test_it_may_die_by_another_hand(self, serve: Serve, connect: Connect) -> None:
        def script(x: Played) -> None:
            x.accept()
            x.token()
            assert x.client_left_within(30)

        def kill_it(tokens_read: int) -> int | None:
            if tokens_read:
                (child,) = [p for p in psutil.Process().children() if p.name() == "cat"]
                os.kill(child.pid, signal.SIGKILL)
            return None

        row = connect(serve(script).url).ask(kill_it, Way.KILLED)
        assert (row.outcome, row.tokens_read) == (Outcome.FAILED, 1)
