"""Our part of Locust's web page: the start form begins runs (`harness.web.runs`); a tab and a live
page show them.
"""

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
    STATE_RUNNING,
    STATE_SPAWNING,
    STATE_STOPPED,
    STATE_STOPPING,
    WorkerRunner,
)
from werkzeug.datastructures import ImmutableMultiDict

from harness.locust.options import form_fields
from harness.run.process import check_can_listen
from harness.web.runs import WebRuns
from harness.web.tab import FILES, HEADERS, brief_text, progress_text, tab_rows
from harness.workload.form import FIELDS, by_id

TAB: Final = "walkaway"
_LOG: Final = logging.getLogger(__name__)
_REPORTED: Final = "walkaway_outcomes"
_NOW: Final = Path(__file__).with_name("now.html").read_text()  # for the end of Locust's page


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
    runs = WebRuns(environment, order)
    runs.tally = report_outcomes(environment)
    environment.events.test_stop.add_listener(runs.stop)  # type: ignore[no-untyped-call]
    environment.events.quit.add_listener(runs.quit)  # type: ignore[no-untyped-call]
    start = app.view_functions["locust.swarm"]

    def swarm() -> Any:
        assert environment.runner is not None
        request.form = ImmutableMultiDict(by_id(request.form))
        is_running = environment.runner.state in (STATE_RUNNING, STATE_SPAWNING)
        why = runs.refuse_change() if is_running else runs.begin(request.form)
        if why is not None:
            return jsonify({"success": False, "message": why, "host": environment.host})
        environment.process_exit_code = 0
        if runs.users is None:
            return start()
        options = vars(environment.parsed_options)
        shown = {name: options[name] for name in ("num_users", "spawn_rate")}
        users, rate = runs.users
        directors = {"user_count": str(users), "spawn_rate": str(rate), "run_time": ""}
        request.form = ImmutableMultiDict(request.form.to_dict() | directors)
        answer = start()
        options |= shown  # the next form is not to show directors for users
        return answer

    app.view_functions["locust.swarm"] = web_ui.auth_required_if_enabled(swarm)  # type: ignore[no-untyped-call]
    _add_tab(web_ui, runs)
    app.register_blueprint(_pages(web_ui, runs), url_prefix=f"{base}/walkaway")


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


def _shown(runs: WebRuns) -> dict[str, Any]:
    return runs.shown | {"report_at": url_for("walkaway.report", _external=True)}


def _state(runs: WebRuns, web_ui: Any) -> str:
    """The test's state now, as Locust caches its own answer for a while."""
    state: str = web_ui.environment.runner.state
    if runs.is_being_judged and state in (STATE_STOPPED, STATE_STOPPING):
        return STATE_RUNNING  # else the page stops polling before the figures are there
    return state


def _add_tab(web_ui: Any, runs: WebRuns) -> None:
    columns = [("figure", "Figure"), ("value", "Value"), ("about", "What it is")]
    structure = [{"key": key, "title": title} for key, title in columns]
    update = web_ui.update_template_args

    def update_with_our_form() -> None:
        update()
        args = web_ui.template_args
        args["missing_host_warning"] = False  # without a host, the bundled engine is started
        shown, options = form_fields(web_ui.environment.parsed_options), args["extra_options"]
        # Locust shows a name that begins with a capital letter as it stands, and sends it so.
        args["extra_options"] = {
            one.label: {**options[name], "default_value": shown[name], "help_text": one.help}
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
            rows = tab_rows(_shown(runs), reported=runs.tally.total())
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
        shown = _shown(runs)  # its points are not decoded: this process runs users
        text = msgspec.json.encode(shown | {"told": progress_text(shown)})
        return Response(text, mimetype="application/json", headers=HEADERS)

    def now() -> Response:
        has_report = bool(runs.shown.get("report"))
        return jsonify({"told": brief_text(_shown(runs)), "has_report": has_report})

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
