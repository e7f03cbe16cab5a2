"""The child process that measures what the web page starts, as Locust's process sees it.

What it says is read by a greenlet and kept (`shown`); nobody waits for it but who must.
"""

import json
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Final

import gevent
import msgspec
from gevent.event import Event

from harness.process import python_module

JUDGED_S: Final = 120.0  # a run that was stopped is settled, judged and drawn within this


class Recorder:
    """The child that measures one run. `is_over` is set when it has ended; `on_lost` is called when
    there is no use in going on."""

    def __init__(self, *, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._process = subprocess.Popen(
            python_module("harness.web.recorder"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for Locust, which then ends its child in order
        )
        self.answer: dict[str, Any] = {}
        self.has_answered = Event()
        self.is_over = Event()
        self.shown: dict[str, Any] = {"phase": "", "state": "ready"}
        gevent.spawn(self._listen)

    def order(self, order: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
        """Let it measure this; its answer: a plan, or why not."""
        self.has_answered.clear()
        self._say({"order": order, "fields": fields})
        self.has_answered.wait()
        return self.answer

    def note(self, text: str, *, users: int) -> None:
        """There are so many users from now on; have this kept with the run."""
        self._say({"note": text, "users": users})

    def stop(self) -> None:
        """The users have stopped."""
        self.shown["phase"] = "letting the server settle"
        self._say({"stop": True})

    def close(self) -> None:
        """Let it finish what it has begun, and wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.is_over.wait(JUDGED_S)

    def _say(self, command: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            return  # it has ended; `_listen` says so

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
        code = self._process.wait()
        if self.shown["state"] not in ("done", "ready"):
            why = (
                f"the measuring process ended with code {code}; its last words are in the "
                "terminal, and the rows of the load in the run's folder (walkaway collect)"
            )
            self.shown |= {"state": "failed", "why": why}
            self._on_lost()
        self.answer = {"event": "refused", "why": self.shown.get("why", f"code {code}")}
        self.has_answered.set()
        self.is_over.set()

    def _hear(self, raw: dict[str, msgspec.Raw]) -> None:
        """`live`, twice a second thousands of numbers, is not unpacked: the page will."""
        live = {"live": raw.pop("live").copy()} if "live" in raw else {}
        message = {name: msgspec.json.decode(value) for name, value in raw.items()} | live
        match message.pop("event"):
            case "plan" | "refused" as event:
                state = "running" if event == "plan" else "ready"
                self.shown |= {"state": state, "run": message.get("run")}
                self.answer = {"event": event, **message}
                self.has_answered.set()
            case "live":
                self.shown |= message
            case "phase":
                self.shown["phase"] = message["text"]
            case "lost":
                self.shown["why"] = message["why"]
                self._on_lost()
            case "done":
                self.shown |= message | {"state": "done"}
            case _:
                pass  # "ready": it waits
