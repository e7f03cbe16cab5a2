"""The runs of a web page, one after the other, each with a child process that measures it.

Start begins a run like `walkaway run`, Stop ends it, and Start again begins the next. A child
process measures (`harness.web.recorder`); here its messages are kept for whoever asks. The next
child waits already while a run goes on, so that a mistake in the form is said at once.
"""

import json
import logging
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import gevent
import msgspec
from gevent.event import Event
from gevent.lock import BoundedSemaphore
from locust.env import Environment
from locust.runners import MasterRunner
from locust.util.timespan import parse_timespan

from harness.errors import ConfigError
from harness.load.open_loop import OpenLoopDirector
from harness.load.options import form_fields, put_in_force
from harness.load.users import AbandoningUser
from harness.run.process import python_module
from harness.workload.form import changed, check_each_applies, refused, why_not_while_running
from harness.workload.plan import LoadPlan
from harness.workload.values import MOST_STREAMS
from harness.workload.workload import USUAL_STREAMS

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


Form = Mapping[str, str]
_LOG: Final = logging.getLogger(__name__)


class WebRuns:
    """The runs of one web page.

    Its state is the child that measures the last run, the one that waits for the next, the number
    of the run and its plan. Only greenlets of this process touch them.
    """

    def __init__(self, environment: Environment, order: Mapping[str, Any]) -> None:
        self._environment = environment
        self._order = order
        self._starting = BoundedSemaphore()
        self._waiting = self._new_recorder()
        self._recorder: Recorder | None = None
        self._plan: LoadPlan | None = None
        self._number = 0
        self.tally: Counter[str] = Counter()  # as the users' processes report it

    @property
    def shown(self) -> dict[str, Any]:
        """What is known of the last run, or of the one that is being started."""
        if self._starting.locked() and self._waiting.shown["phase"]:
            return self._waiting.shown
        return {"state": "ready"} if self._recorder is None else self._recorder.shown

    @property
    def is_being_judged(self) -> bool:
        """Its users have stopped, and its figures are not there yet."""
        return self._recorder is not None and self._recorder.shown["state"] == "running"

    def begin(self, form: Form) -> str | None:
        """Prepare a run as the form says. Returns why it cannot be; else Locust may start."""
        if not self._starting.acquire(blocking=False):
            return "a test is being started already"
        _LOG.info("a test is being started: first comes its server")
        try:
            return self._problem(form) or self._prepare(form)
        finally:
            self._starting.release()

    def change(self, form: Form) -> str | None:
        """Note that the running load gets another number of users. Returns why it cannot."""
        assert self._recorder is not None
        why = self._why_not(form) or self._problem(form)
        # Locust's dialog closes without a word, so the tab and the live page say it.
        self._recorder.shown["refused"] = why
        if why is None:
            users, rate = form["user_count"], form["spawn_rate"]
            text = f"the page set {users} users, {rate} a second"
            self._recorder.note(text, users=int(users))
        return why

    def _why_not(self, form: Form) -> str | None:
        """Why the running load cannot become what the form says; None where it can."""
        ours = {name: text for name, text in form.items() if name.startswith("walkaway_")}
        if why := why_not_while_running(changed(ours, form_fields(self._options))):
            return why
        if self._is_open_loop:
            return "requests come by a schedule, which a running test cannot change: stop it first"
        users, most = form.get("user_count", ""), self._options.walkaway_most_streams
        most_streams = int(most or USUAL_STREAMS)
        if not (users.isdecimal() and 1 <= int(users) <= most_streams):
            return refused("user_count", users, form_fields(self._options))
        return None

    @property
    def users(self) -> tuple[int, float] | None:
        """How many users Locust must start, and how many a second, where the form does not say:
        the directors of an open loop, one in each process."""
        if not self._is_open_loop:
            return None
        runner = self._environment.runner
        directors = runner.worker_count if isinstance(runner, MasterRunner) else 1
        return directors, float(directors)

    def stop(self, **_: Any) -> None:
        """The users have stopped."""
        if self._recorder is not None:
            self._recorder.shown["refused"] = None
            self._recorder.stop()

    def quit(self, **_: Any) -> None:
        """Let the run that goes on be saved, and the child that waits end."""
        for recorder in (self._recorder, self._waiting):
            if recorder is not None:
                recorder.close()

    @property
    def _options(self) -> Any:
        assert self._environment.parsed_options is not None
        return self._environment.parsed_options

    @property
    def _is_open_loop(self) -> bool:
        return self._plan is not None and self._plan.schedule is not None

    def _problem(self, form: Form) -> str | None:
        runner = self._environment.runner
        if isinstance(runner, MasterRunner) and not runner.worker_count:
            return "no worker has connected yet: start one with --worker"
        try:
            rate = float(form.get("spawn_rate", "1"))
        except ValueError:
            rate = 0.0
        if not 0 < rate <= MOST_STREAMS:
            return refused("spawn_rate", form.get("spawn_rate", ""), form)
        return None

    def _prepare(self, form: Form) -> str | None:
        shown = {"user_count": "1"} | form_fields(self._options)
        try:
            fields = shown | dict(form) | _run_time(form)
            check_each_applies(fields, shown)
        except ValueError:
            return "Run time: write for example 20, 20s, 3m, 2h or 1h20m"
        except ConfigError as error:
            return str(error)
        if self._recorder is not None:  # its server may still be busy with what was left
            self._recorder.is_over.wait()
        answer = self._waiting.order(self._numbered_order(), fields)
        if answer["event"] == "refused":
            if self._waiting.is_over.is_set():
                self._waiting = self._new_recorder()
            return str(answer["why"])
        self._number += 1
        self._recorder, self._waiting = self._waiting, self._new_recorder()
        self._follow(LoadPlan.model_validate(answer["plan"], strict=False))
        return None

    def _follow(self, plan: LoadPlan) -> None:
        """Let the users that Locust starts next, here or in its workers, follow this plan."""
        self._plan = plan
        user_class = OpenLoopDirector if self._is_open_loop else AbandoningUser
        self._environment.user_classes = [user_class]
        put_in_force(self._options, plan)
        self.tally.clear()
        gevent.spawn_later(plan.run.max_seconds, self._stop_if, self._number)

    def _numbered_order(self) -> dict[str, Any]:
        """Of the runs of a page whose folder was named, each has a folder of its own in it."""
        if (out := self._order.get("out")) is None:
            return dict(self._order)
        folders = (Path(out) / str(number) for number in count(1))
        return {**self._order, "out": str(next(one for one in folders if not one.exists()))}

    def _new_recorder(self) -> Recorder:
        return Recorder(on_lost=self._stop_users)

    def _stop_users(self) -> None:
        assert self._environment.runner is not None
        gevent.spawn(self._environment.runner.stop)

    def _stop_if(self, number: int) -> None:
        if number == self._number:
            self._stop_users()


def _run_time(form: Form) -> dict[str, str]:
    """Locust's ways of writing a time, in seconds. Raises ValueError for anything else."""
    text = form.get("run_time", "").strip()
    return {"run_time": str(parse_timespan(text)) if text else ""}
