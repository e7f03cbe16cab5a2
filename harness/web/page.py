"""Our part of Locust's web page: the start form begins runs (`harness.web.runs`); a tab and a live
page show them.
"""

import inspect
import io
import json
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from flask import Blueprint, Response, jsonify, make_response, request, send_file, url_for
from locust.env import Environment
from locust.runners import (
    STATE_INIT,
    STATE_RUNNING,
    STATE_SPAWNING,
    STATE_STOPPED,
    STATE_STOPPING,
    WorkerRunner,
)

from harness.locust.options import form_fields
from harness.run.process import check_can_listen
from harness.web.runs import WebRuns
from harness.web.tab import FILES, HEADERS, brief_text, tab_rows
from harness.workload.form import FIELDS, by_id, described_fields, label_in

TAB: Final = "walkaway"
_LOG: Final = logging.getLogger(__name__)
_REPORTED: Final = "walkaway_outcomes"
_NOW: Final = (  # for the end of Locust's page
    Path(__file__)
    .with_name("now.html")
    .read_text()
    .replace("{{fields}}", json.dumps(described_fields()).replace("<", "\\u003c"))
)


def report_outcomes(environment: Environment) -> Counter[str]:
    counts: Counter[str] = Counter()
    add = counts.update

    def note(name: str, **_: Any) -> None:
        add([name])

    def report(data: dict[str, Any], **_: Any) -> None:
        data[_REPORTED] = dict(counts)
        counts.clear()

    def hear(data: dict[str, Any], **_: Any) -> None:
        add(data.get(_REPORTED, {}))

    events = environment.events
    if isinstance(environment.runner, WorkerRunner):
        events.report_to_master.add_listener(report)  # type: ignore[no-untyped-call]
    events.worker_report.add_listener(hear)  # type: ignore[no-untyped-call]
    events.request.add_listener(note)  # type: ignore[no-untyped-call]
    return counts


def extend_page(environment: Environment, order: Mapping[str, Any]) -> None:
    """Raises ConfigError if the page cannot be served."""
    web_ui = environment.web_ui
    assert web_ui is not None
    assert web_ui.app is not None
    app = web_ui.app
    assert environment.parsed_options is not None
    base = environment.parsed_options.web_base_path or ""
    _take_terminal(web_ui, base)
    start = inspect.unwrap(app.view_functions["locust.swarm"])
    runs = WebRuns(environment, order, launch=lambda form: _launch(web_ui, runs, start, form))
    runs.tally = report_outcomes(environment)
    environment.events.test_stop.add_listener(runs.stop)  # type: ignore[no-untyped-call]
    environment.events.quit.add_listener(runs.quit)  # type: ignore[no-untyped-call]
    _take_buttons(web_ui, runs)
    _add_tab(web_ui, runs)
    app.register_blueprint(_pages(web_ui, runs), url_prefix=f"{base}/walkaway")


def _take_buttons(web_ui: Any, runs: WebRuns) -> None:
    environment, views = web_ui.environment, web_ui.app.view_functions
    stop_users = views["locust.stop"]

    def swarm() -> Any:
        runs.asked += 1
        is_running = environment.runner.state in (STATE_RUNNING, STATE_SPAWNING)
        why = runs.refuse_change() if is_running else runs.begin(by_id(request.form))
        message = why or "the test is starting"
        return jsonify({"success": why is None, "message": message, "host": environment.host})

    def stop() -> Any:
        if not runs.is_starting:
            return stop_users()
        runs.stop_starting()
        return jsonify({"success": True, "message": "the test is not started"})

    for name, view in (("swarm", swarm), ("stop", stop)):
        views[f"locust.{name}"] = web_ui.auth_required_if_enabled(view)


def _launch(web_ui: Any, runs: WebRuns, start: Callable[[], Any], form: Mapping[str, str]) -> None:
    """Let Locust start the users of this form, as if it had just been sent."""
    environment, plan = web_ui.environment, runs.plan
    assert plan is not None
    environment.process_exit_code = 0
    sent = runs.as_locust_needs(form)
    with web_ui.app.test_request_context(method="POST", data=sent):
        start()
    # The next form shows these users and this rate, not those of directors.
    shown = {"num_users": plan.run.users, "spawn_rate": float(form.get("spawn_rate", "1"))}
    vars(environment.parsed_options).update(shown)


def _take_terminal(web_ui: Any, base: str) -> None:
    check_can_listen(web_ui.host, web_ui.port, flag="--web-port")
    logging.getLogger("harness").setLevel(logging.INFO)  # whatever Locust's own level is
    logging.getLogger("locust.stats_logger").disabled = True  # tables of its counts, at the end
    _LOG.info(
        "the page is at http://%s:%d%s; Ctrl-C ends it",
        web_ui.host or "127.0.0.1",
        web_ui.port,
        base,
    )
    sys.stdin = io.StringIO()  # keys of the terminal would start users without a plan


def _state(runs: WebRuns, web_ui: Any) -> str:
    """The test's state now, as Locust caches its own answer for a while. The page asks no more in
    other states than RUNNING and SPAWNING."""
    state: str = web_ui.environment.runner.state
    if runs.is_starting:
        return STATE_SPAWNING
    if runs.is_measured and state in (STATE_INIT, STATE_STOPPED, STATE_STOPPING):
        return STATE_RUNNING
    return state


def _add_tab(web_ui: Any, runs: WebRuns) -> None:
    columns = [("figure", "Figure"), ("value", "Value"), ("about", "What it is")]
    structure = [{"key": key, "title": title} for key, title in columns]
    update = web_ui.update_template_args

    def update_with_our_form() -> None:
        update()
        args = web_ui.template_args
        args["state"] = _state(runs, web_ui)
        args["missing_host_warning"] = False  # without a host, the bundled engine is started
        shown, options = form_fields(web_ui.environment.parsed_options), args["extra_options"]
        # Locust shows a name that begins with a capital letter as it stands, and sends it so.
        args["extra_options"] = {
            one.label: {**options[name], "default_value": shown[name], "help_text": ""}
            for name, one in FIELDS.items()
            if name in options
        }

    web_ui.app.jinja_env.policies["json.dumps_kwargs"] = {"sort_keys": False}  # the form's order
    web_ui.update_template_args = update_with_our_form
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
            data = response.get_json() | {"state": _state(runs, web_ui)}
            shown = runs.shown | {"report_at": url_for("walkaway.report", _external=True)}
            rows = tab_rows(shown, reported=runs.tally.total())
            data["extended_stats"] = [{"key": TAB, "data": rows}]
            response.set_data(json.dumps(data))
        elif request.endpoint == "locust.index":
            page = response.get_data(as_text=True)
            response.set_data(page.replace("</body>", f"{_NOW}</body>"))
        return response


def _pages(web_ui: Any, runs: WebRuns) -> Blueprint:
    pages = Blueprint("walkaway", __name__)

    def file(path: Path) -> Response:
        response = send_file(path)
        response.headers.update(HEADERS)
        return response

    def figures() -> Response:
        shown = runs.shown  # its points are not decoded: this process runs users
        text = msgspec.json.encode(shown | {"told": brief_text(shown)})
        return Response(text, mimetype="application/json", headers=HEADERS)

    def now() -> Response:
        shown = runs.shown
        return jsonify(
            {
                "told": brief_text(shown),
                "asked": runs.asked,
                "is_busy": runs.is_starting or runs.is_measured,
                "has_report": bool(shown.get("report")),
                "field": label_in(shown.get("not_started") or ""),
                "why": shown.get("not_started"),
            }
        )

    def report() -> Response:
        path = runs.shown.get("report")
        if path is None:
            return make_response("There is no report yet: it is drawn after a test.", 404)
        name = f"walkaway-{runs.shown['run']}.html"
        return send_file(path, as_attachment="download" in request.args, download_name=name)

    def add(rule: str, endpoint: str, view: Callable[[], Response]) -> None:
        pages.add_url_rule(rule, endpoint, web_ui.auth_required_if_enabled(view))

    for name, path in FILES.items():
        add(f"/{name}", name.replace(".", "-"), partial(file, path))
    add("/live.json", "figures", figures)
    add("/now.json", "now", now)
    add("/report", "report", report)
    return pages
