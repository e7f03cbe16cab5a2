"""The runs of a web page, each measured by a child process (`harness.web.recorder`).

A start has two parts. The form waits for the first: that all its fields are right. The second can
take half a minute (an engine starts, a server is asked): the page shows it, and Stop ends it.
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
from gevent import Greenlet
from gevent.event import Event
from locust.env import Environment
from locust.runners import MasterRunner, Runner
from locust.util.timespan import parse_timespan

from harness.errors import ConfigError
from harness.locust.open_loop import OpenLoopDirector
from harness.locust.options import form_fields, put_in_force
from harness.locust.users import AbandoningUser
from harness.run.process import python_module
from harness.web.tab import brief_text
from harness.workload.form import FIELDS, check_each_applies, refused
from harness.workload.plan import LoadPlan
from harness.workload.values import MOST_STREAMS

Form = Mapping[str, str]

_LOG: Final = logging.getLogger(__name__)
STARTING: Final = "starting the process that measures"
STOPPING: Final = "ending what had been started"
ALREADY: Final = "a test is already starting"
QUICK_S: Final = 1.0  # a refusal within this time stands in the form, such as of a wrong address
JUDGED_S: Final = 120.0  # a stopped run settles, is judged and drawn within this time
NOT_WHILE_RUNNING: Final = "nothing can change while a test runs: stop it, and start another"


class RecorderProcess:
    """The child that measures one run. `has_answered`: it has sent its plan or a refusal.
    `is_over`: it has ended. `on_accepted` is called when the form is right, `on_lost` when the
    server is gone."""

    def __init__(
        self,
        config: Mapping[str, Any],
        fields: Form,
        *,
        on_accepted: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_accepted = on_accepted
        self._on_lost = on_lost
        self._process = subprocess.Popen(
            python_module("harness.commands.page_run"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for Locust, which then ends its child in config
        )
        self.answer: dict[str, Any] = {}
        self.has_answered = Event()
        self.is_over = Event()
        self.shown: dict[str, Any] = {"phase": STARTING, "state": "starting"}
        self._say(json.dumps({"config": config, "fields": fields}))
        gevent.spawn(self._listen)

    def stop(self, phase: str) -> None:
        self.shown |= {"phase": phase, "refused": None}
        self._say("stop")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self.is_over.wait(JUDGED_S)

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except (OSError, ValueError):
            return  # it has ended, which `_listen` reports

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._hear(msgspec.json.decode(line, type=dict[str, msgspec.Raw]))
        code = self._process.wait()
        if self.shown["state"] not in ("done", "ready"):
            why = (
                f"the measuring process ended with code {code}; its output is in the terminal, "
                "and walkaway report judges what lies in the run's folder"
            )
            self.shown |= {"state": "failed", "why": why}
            _LOG.error(why)
            self._on_lost()
        if not self.has_answered.is_set():
            self.answer = {"event": "refused", "why": f"the measuring process ended: code {code}"}
            self.has_answered.set()
        self.is_over.set()

    def _hear(self, raw: dict[str, msgspec.Raw]) -> None:
        """`live`, thousands of numbers twice a second, is passed on undecoded."""
        live = {"live": raw.pop("live").copy()} if "live" in raw else {}
        message = {name: msgspec.json.decode(value) for name, value in raw.items()} | live
        match message.pop("event"):
            case "accepted":
                self._on_accepted()
            case "plan" | "refused" as event:
                state = "running" if event == "plan" else "ready"
                self.shown |= {"state": state, "run": message.get("run")}
                self.answer = {"event": event, **message}
                self.has_answered.set()
            case "live":
                self.shown |= message
            case "phase":
                if not message["text"].startswith(self.shown["phase"]):  # it only says more
                    _LOG.info("%s", message["text"])
                self.shown["phase"] = message["text"]
            case "lost":
                self.shown["why"] = message["why"]
                self._on_lost()
            case "done":
                self.shown |= message | {"state": "done"}
                _LOG.info("run %s: %s", Path(self.shown["folder"]).name, brief_text(self.shown))
            case other:
                raise AssertionError(other)


class WebRuns:
    """The runs of one web page. Only greenlets of this process change its state. `launch` starts
    the users of a form."""

    def __init__(
        self, environment: Environment, config: Mapping[str, Any], *, launch: Callable[[Form], None]
    ) -> None:
        self._environment = environment
        self._config = config
        self._launch = launch
        self._is_right = Event()  # the form that is being started
        self._starting: Greenlet | None = None
        self._is_unwanted = False  # it was stopped meanwhile
        self._not_started: str | None = None  # why the last start was refused
        self._next: RecorderProcess | None = None
        self._recorder: RecorderProcess | None = None
        self.plan: LoadPlan | None = None  # of the last load that was started
        self.asked = 0  # the number of starts and changes that were asked for
        self.tally: Counter[str] = Counter()  # as the users' processes report it

    @property
    def shown(self) -> dict[str, Any]:
        if self._next is not None:
            return self._next.shown
        shown = {"state": "ready"} if self._recorder is None else self._recorder.shown
        return shown | {"not_started": self._not_started}

    @property
    def is_starting(self) -> bool:
        return self._starting is not None and not self._starting.ready()

    @property
    def is_measured(self) -> bool:
        """Whether users may have started and the run is not judged yet."""
        return self._recorder is not None and self._recorder.shown["state"] == "running"

    def as_locust_needs(self, form: Form) -> dict[str, str]:
        """A form that starts the plan's users or, of an open loop, a director in each process, whom
        no run time of Locust ends."""
        assert self.plan is not None
        users, rate, runner = self.plan.run.users, form.get("spawn_rate", "1"), self._runner
        whole = {**form, "user_count": str(users), "spawn_rate": rate}
        if self.plan.schedule is None:
            return whole
        directors = str(runner.worker_count if isinstance(runner, MasterRunner) else 1)
        return {**whole, "user_count": directors, "spawn_rate": directors, "run_time": ""}

    def begin(self, form: Form) -> str | None:
        """Why the form was refused; None if its test starts."""
        if self.is_starting:
            return ALREADY
        self._not_started, self._is_unwanted = None, False
        self._is_right.clear()
        start = self._starting = gevent.spawn(self._start, form)
        start.link(lambda _: self._is_right.set())
        self._is_right.wait()
        start.join(QUICK_S)
        return self._not_started

    def stop_starting(self) -> None:
        self._is_unwanted = True
        if self._next is not None:
            self._next.stop(STOPPING)

    def _start(self, form: Form) -> None:
        try:
            self._prepare(self._fields(form))
        except ConfigError as error:
            self._not_started = str(error)
            _LOG.info("no test was started: %s", error)
        else:
            self._launch(form)

    def refuse_change(self) -> str:
        """Locust's dialog hides the reason, so the tab and the live page show it."""
        assert self._recorder is not None
        self._recorder.shown["refused"] = NOT_WHILE_RUNNING
        return NOT_WHILE_RUNNING

    def stop(self, **_: Any) -> None:
        if self._recorder is not None:
            self._recorder.stop("letting the server settle")

    def quit(self, **_: Any) -> None:
        for recorder in (self._recorder, self._next):
            if recorder is not None:
                recorder.close()

    def _fields(self, form: Form) -> dict[str, str]:
        runner, rate = self._runner, form.get("spawn_rate", "1")
        if isinstance(runner, MasterRunner) and not runner.worker_count:
            raise ConfigError("no worker has connected yet: start one with --worker")
        try:
            is_rate = 0 < float(rate) <= MOST_STREAMS
        except ValueError:
            is_rate = False
        if not is_rate:
            raise ConfigError(refused(FIELDS["spawn_rate"], rate))
        shown = {"user_count": "1"} | form_fields(self._options)
        text = form.get("run_time", "").strip()
        try:
            run_time = str(parse_timespan(text)) if text else ""
        except ValueError as error:
            raise ConfigError('"Run time" must be like 20, 20s, 3m, 2h or 1h20m') from error
        fields = shown | dict(form) | {"run_time": run_time}
        check_each_applies(fields, shown)
        return fields

    def _prepare(self, fields: Form) -> None:
        if self._recorder is not None:  # its server may still be busy with abandoned requests
            self._recorder.is_over.wait()
        self._check_wanted()
        following = self._next = RecorderProcess(
            self._numbered_config(),
            fields,
            on_accepted=self._is_right.set,
            on_lost=self._stop_users,
        )
        following.has_answered.wait()
        self._next = None
        self._check_wanted()
        if following.answer["event"] == "refused":
            raise ConfigError(following.answer["why"])
        self._recorder = following
        self.plan = plan = LoadPlan.model_validate(following.answer["plan"], strict=False)
        is_open_loop = plan.schedule is not None
        self._environment.user_classes = [OpenLoopDirector if is_open_loop else AbandoningUser]
        put_in_force(self._options, plan)
        self.tally.clear()
        gevent.spawn_later(plan.run.max_seconds, self._stop_if, following)

    def _check_wanted(self) -> None:
        if self._is_unwanted:
            raise ConfigError("it was stopped before its load began")

    @property
    def _options(self) -> Any:
        assert self._environment.parsed_options is not None
        return self._environment.parsed_options

    def _numbered_config(self) -> dict[str, Any]:
        if (out := self._config.get("out")) is None:
            return dict(self._config)
        folders = (Path(out) / str(number) for number in count(1))
        return {**self._config, "out": str(next(one for one in folders if not one.exists()))}

    @property
    def _runner(self) -> Runner:
        assert self._environment.runner is not None
        return self._environment.runner

    def _stop_users(self) -> None:
        gevent.spawn(self._runner.stop)

    def _stop_if(self, recorder: RecorderProcess) -> None:
        if recorder is self._recorder:
            self._stop_users()
