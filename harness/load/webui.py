"""Our part of Locust's web page: its start form begins runs, a tab and a page of ours show them.

Start begins a run like `walkaway run`, Stop ends it, and Start again begins the next. A child
process measures (`harness.web.recorder`); here its messages are kept for whoever asks. The next
child waits already while a run goes on, so that a mistake in the form is said at once.

Its state is what the last run has come to (`_shown`), the child that measures and the one that
waits. Only greenlets of this process touch them.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Final

import gevent
import msgspec
from flask import Blueprint, Response, jsonify, make_response, request, send_file
from gevent.lock import BoundedSemaphore
from locust.env import Environment
from locust.runners import (
    STATE_RUNNING,
    STATE_SPAWNING,
    STATE_STOPPED,
    STATE_STOPPING,
    MasterRunner,
    WorkerRunner,
)
from locust.util.timespan import parse_timespan

from harness.load.options import form_fields, put_in_force
from harness.load.plan import LoadPlan
from harness.load.web_recorder import Recorder

TAB: Final = "walkaway"
PAGE: Final = Path(__file__).parents[1] / "web"
_REPORTED: Final = "walkaway_outcomes"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_LINK: Final = (
    '<a href="./walkaway/live" style="position:fixed;right:16px;bottom:16px;z-index:2000;'
    "padding:8px 14px;border-radius:6px;background:#0072B2;color:#fff;"
    'font:600 14px system-ui,sans-serif;text-decoration:none">walkaway: live page</a>'
)


class WebRuns:
    """The runs of one web page, one after the other."""

    def __init__(self, environment: Environment, order: Mapping[str, Any]) -> None:
        self._environment = environment
        self._order = order
        self._starting = BoundedSemaphore()
        self._waiting = Recorder(on_lost=self._stop_users)
        self._recorder: Recorder | None = None
        self._number = 0
        self.tally: Counter[str] = Counter()  # as the users' processes report it

    @property
    def shown(self) -> dict[str, Any]:
        """What is known of the last run."""
        return {"state": "ready"} if self._recorder is None else self._recorder.shown

    @property
    def is_being_judged(self) -> bool:
        """Its users have stopped, and its figures are not there yet."""
        return self._recorder is not None and not self._recorder.is_over.is_set()

    def begin(self, form: Mapping[str, str]) -> str | None:
        """Prepare a run as the form says. Returns why it cannot be; else Locust may start."""
        if not self._starting.acquire(blocking=False):
            return "a test is being started already"
        try:
            return self._problem(form) or self._prepare(form)
        finally:
            self._starting.release()

    def stop(self, **_: Any) -> None:
        """The users have stopped."""
        if self._recorder is not None:
            self._recorder.shown["phase"] = "letting the server settle"
            self._recorder.stop()

    def quit(self, **_: Any) -> None:
        """Let the run that goes on be saved, and the child that waits end."""
        for recorder in (self._recorder, self._waiting):
            if recorder is not None:
                recorder.close()

    def _problem(self, form: Mapping[str, str]) -> str | None:
        runner = self._environment.runner
        if isinstance(runner, MasterRunner) and not runner.worker_count:
            return "no worker has connected yet: start one with --worker"
        try:
            rate = float(form.get("spawn_rate", "1"))
        except ValueError:
            rate = 0.0
        if not 0 < rate < float("inf"):
            return f"ramp up: must be more than 0 users per second, not {form['spawn_rate']!r}"
        return None

    def _prepare(self, form: Mapping[str, str]) -> str | None:
        options = self._environment.parsed_options
        assert options is not None
        try:
            fields = form_fields(options) | dict(form) | _run_time(form)
        except ValueError:
            return "run time: write for example 20, 20s, 3m, 2h or 1h20m"
        if self._recorder is not None:  # its server may still be busy with what was left
            self._recorder.is_over.wait()
        answer = self._waiting.order(self._numbered_order(), fields)
        if answer["event"] == "refused":
            if self._waiting.is_over.is_set():
                self._waiting = Recorder(on_lost=self._stop_users)
            return str(answer["why"])
        self._number += 1
        self._recorder, self._waiting = self._waiting, Recorder(on_lost=self._stop_users)
        plan = msgspec.convert(answer["plan"], type=LoadPlan)
        put_in_force(options, plan)
        self.tally.clear()
        gevent.spawn_later(plan.max_seconds, self._stop_if, self._number)
        return None

    def _numbered_order(self) -> dict[str, Any]:
        """Of the runs of a page whose folder was named, each has a folder of its own in it."""
        if (out := self._order.get("out")) is None:
            return dict(self._order)
        folders = (Path(out) / str(number) for number in count(1))
        return {**self._order, "out": str(next(one for one in folders if not one.exists()))}

    def _stop_users(self) -> None:
        assert self._environment.runner is not None
        gevent.spawn(self._environment.runner.stop)

    def _stop_if(self, number: int) -> None:
        if number == self._number:
            self._stop_users()


def _run_time(form: Mapping[str, str]) -> dict[str, str]:
    """Locust's ways of writing a time, in seconds. Raises ValueError for anything else."""
    text = form.get("run_time", "").strip()
    return {"run_time": str(parse_timespan(text)) if text else ""}


def report_outcomes(environment: Environment) -> Counter[str]:
    """Count what became of the requests, also those of workers, which tell the master with each of
    their reports. Returns the counter, which goes on counting."""
    counts: Counter[str] = Counter()
    add = counts.update

    def note(name: str, **_: Any) -> None:
        add([name])

    def tell(data: dict[str, Any], **_: Any) -> None:
        data[_REPORTED] = dict(counts)
        counts.clear()

    def hear(data: dict[str, Any], **_: Any) -> None:
        add(data.get(_REPORTED, {}))

    events = environment.events
    if isinstance(environment.runner, WorkerRunner):
        events.report_to_master.add_listener(tell)  # type: ignore[no-untyped-call]
    events.worker_report.add_listener(hear)  # type: ignore[no-untyped-call]
    events.request.add_listener(note)  # type: ignore[no-untyped-call]
    return counts


def extend_page(environment: Environment, order: Mapping[str, Any]) -> None:
    """Put our form, tab and page into Locust's; called once, when the users are prepared."""
    web_ui = environment.web_ui
    assert web_ui is not None
    assert web_ui.app is not None
    app = web_ui.app
    runs = WebRuns(environment, order)
    runs.tally = report_outcomes(environment)
    environment.events.test_stop.add_listener(runs.stop)  # type: ignore[no-untyped-call]
    environment.events.quit.add_listener(runs.quit)  # type: ignore[no-untyped-call]
    start = app.view_functions["locust.swarm"]

    def swarm() -> Any:
        assert environment.runner is not None
        if environment.runner.state in (STATE_RUNNING, STATE_SPAWNING):
            return start()  # only the number of users changes
        if (why := runs.begin(request.form)) is not None:
            return jsonify({"success": False, "message": why, "host": environment.host})
        environment.process_exit_code = 0
        return start()

    app.view_functions["locust.swarm"] = web_ui.auth_required_if_enabled(swarm)  # type: ignore[no-untyped-call]
    _add_tab(web_ui, runs)
    app.register_blueprint(_pages(web_ui, runs), url_prefix=_prefix(environment))


def _prefix(environment: Environment) -> str:
    options = environment.parsed_options
    assert options is not None
    return f"{options.web_base_path or ''}/walkaway"


def _add_tab(web_ui: Any, runs: WebRuns) -> None:
    columns = [("figure", "Figure"), ("value", "Value"), ("about", "What it is")]
    structure = [{"key": key, "title": title} for key, title in columns]
    update = web_ui.update_template_args

    def update_without_warning() -> None:
        update()
        web_ui.template_args["missing_host_warning"] = False  # without a host one is started

    web_ui.update_template_args = update_without_warning
    web_ui.template_args |= {
        "extended_tabs": [{"title": TAB, "key": TAB}],
        "extended_tables": [{"key": TAB, "structure": structure}],
        "extended_csv_files": [
            {"href": "./walkaway/report?download=1", "title": "Download the walkaway report"}
        ],
    }

    @web_ui.app.after_request  # type: ignore[untyped-decorator]
    def add_ours(response: Response) -> Response:
        if response.status_code != 200:
            return response
        if request.endpoint == "locust.request_stats":
            data = response.get_json()
            if runs.is_being_judged and data["state"] in (STATE_STOPPED, STATE_STOPPING):
                data["state"] = STATE_RUNNING  # or the page would ask no more before the figures
            data["extended_stats"] = [{"key": TAB, "data": tab_rows(runs.shown, runs.tally)}]
            response.set_data(json.dumps(data))
        elif request.endpoint == "locust.index":
            page = response.get_data(as_text=True)
            response.set_data(page.replace("</body>", f"{_LINK}</body>"))
        return response


def tab_rows(shown: Mapping[str, Any], tally: Mapping[str, int]) -> list[dict[str, str]]:
    """The rows of our tab: how far the run is, its figures, and what is missing."""
    state = str(shown.get("why") or shown.get("phase") or "no test has been started yet")
    if shown["state"] == "done" and not shown.get("why"):
        state = "judged: the report is ready (Download Data, or the live page)"
    rows = [{"figure": "run", "value": str(shown.get("run") or ""), "about": state}]
    rows += shown.get("rows", [])
    live = shown.get("live", {}).get("outcomes", {})
    elsewhere = sum(tally.values()) - sum(live.values())
    if shown["state"] == "done" and elsewhere > 0:
        about = "their rows lie on the machines of the workers, and are not in the figures"
        rows.append({"figure": "requests elsewhere", "value": str(elsewhere), "about": about})
    return rows


def _pages(web_ui: Any, runs: WebRuns) -> Blueprint:
    pages = Blueprint("walkaway", __name__)

    def file(name: str) -> Response:
        response = send_file(PAGE / name)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    def figures() -> Response:
        return jsonify(runs.shown)

    def report() -> Response:
        path = runs.shown.get("report")
        if path is None:
            return make_response("There is no report yet: it is drawn when a test has ended.", 404)
        name = f"walkaway-{runs.shown['run']}.html"
        return send_file(path, as_attachment="download" in request.args, download_name=name)

    def add(rule: str, endpoint: str, view: Callable[[], Response]) -> None:
        pages.add_url_rule(rule, endpoint, web_ui.auth_required_if_enabled(view))

    add("/live", "page", lambda: file("live.html"))
    add("/live.js", "script", lambda: file("live.js"))
    add("/live.css", "style", lambda: file("live.css"))
    add("/live.json", "figures", figures)
    add("/report", "report", report)
    return pages
