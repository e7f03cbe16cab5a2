"""The whole report, from a run folder to HTML, read back with a parser."""

import base64
import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dashboards.__main__ import main
from tests.dashboards.reading import body_of, page_of

MakeRun = Callable[..., Path]


def test_a_report_has_every_picture_and_every_figure(make_run: MakeRun) -> None:
    page = page_of(make_run())
    assert set(page.figures()) == {
        f"run0-{name}"
        for name in ("stages", "cancel-latency", "cancel-steps", "waste", "waste-phase", "slots")
    } | {"run0-kv", "run0-cpu", "run0-survivors", "run0-lag"}
    assert page.texts("h1") == ["What does a synthetic server do?"]
    body = body_of(page)
    assert "13.1 ms" in body
    assert "client_lag_s" in body
    assert "walkaway run 'a workload.toml'" in body
    assert "No GPU was sampled" in body
    plots = {
        attributes["id"]: attributes["aria-label"]
        for _, attributes, _ in page.elements
        if attributes.get("role") == "img"
    }
    assert set(plots) == set(page.figures())
    assert all(plots.values())


def test_a_gpu_is_drawn_by_what_it_told(make_run: MakeRun) -> None:
    page = page_of(make_run(gpu=True))
    assert {"run0-gpu-utilisation", "run0-gpu-memory", "run0-cpu"} <= set(page.figures())
    assert "run0-gpu-power" not in page.figures()
    assert "No GPU was sampled" not in body_of(page)


def test_nothing_is_fetched_and_only_our_scripts_may_run(make_run: MakeRun) -> None:
    page = page_of(make_run())
    for tag, attributes, _ in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    style = "".join(page.texts("style"))
    assert "url(" not in style
    assert "@import" not in style
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in page.scripts()
    ]
    assert len(hashes) == 3
    assert page.policy() == (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def test_text_from_outside_cannot_become_markup(make_run: MakeRun) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = make_run(
        question=evil,
        model=evil,
        validity=[{"level": "warning", "text": evil}],
        not_measurable={evil: evil},
    )
    page = page_of(run)
    assert len(page.scripts()) == 3
    assert page.texts("h1") == [evil]
    assert not [tag for tag, _, _ in page.elements if tag == "img"]
    html = (run / "report.html").read_text(encoding="utf-8")
    data = re.search(r'id="figures">(.*?)</script>', html, re.DOTALL)
    assert data is not None
    assert "<" not in data[1]


def test_ghosts_are_drawn_as_censored_and_told_in_words(make_run: MakeRun) -> None:
    page = page_of(make_run(ghosts=6))
    body = body_of(page)
    assert "6 of 30 abandoned requests went on as if nobody had left" in body
    assert "p99 > 2 s" in body
    assert "should be zero" in body
    curve, ghosts = page.figures()["run0-cancel-latency"]["data"]
    assert re.search(r": [1-9]", ghosts["name"])
    assert curve["type"] == ghosts["type"] == "scatter"


def test_warnings_are_announced_before_the_figures(make_run: MakeRun) -> None:
    levels = {"warning": "The load was starved.", "invalid": "Nobody left.", "info": "No GPU."}
    said = [{"level": level, "text": text} for level, text in levels.items()]
    page = page_of(make_run(validity=said))
    body = body_of(page)
    figures = body.index("Cancel latency")
    assert body.index("1 warning") < figures
    assert body.index("Nobody left.") < figures  # so they mean nothing
    assert figures < body.index("The load was starved.") < body.index("No GPU.")
    ids = {attributes.get("id") for _, attributes, _ in page.elements}
    assert "#run0-trust" in [attributes.get("href") for _, attributes, _ in page.elements]
    assert "run0-trust" in ids


def test_figures_that_mean_nothing_are_neither_told_nor_praised(make_run: MakeRun) -> None:
    page = page_of(make_run(validity=[{"level": "invalid", "text": "The client was too late."}]))
    body = body_of(page)
    assert "When a user left" not in body
    assert "as it should be" not in body
    assert body.index("The client was too late.") < body.index("no verdict")
    assert body.index("no verdict") < body.index("Cancel latency")


@pytest.mark.parametrize("status", ["interrupted", "target_failed"])
def test_a_run_that_broke_off_gets_no_verdict_and_no_praise(make_run: MakeRun, status: str) -> None:
    page = page_of(make_run(status=status))
    body = body_of(page)
    assert f"the run did not come to its end: {status.replace('_', ' ')}" in body
    assert "as it should be" not in body
    (verdict,) = (of for _, of, _ in page.elements if of.get("class") == "verdict")
    assert verdict["data-mark"] == "unknown"


def test_a_timeline_is_told_to_who_cannot_see_it(make_run: MakeRun) -> None:
    page = page_of(make_run(gpu=True))
    alts = {
        of["id"]: str(of["aria-label"]) for _, of, _ in page.elements if of.get("role") == "img"
    }
    assert "running: highest 4, mean " in alts["run0-slots"]
    assert "waiting: highest 2, mean 2, at the end 2" in alts["run0-slots"]
    assert "at the end 0; waiting" in alts["run0-slots"]
    for name in ("run0-slots", "run0-kv"):
        assert "users who left, 30; preemptions, 0" in alts[name]
    assert "blocks in use: highest 16, mean" in alts["run0-kv"]
    assert "engine worker: highest 0.8, mean 0.8, at the end 0.8" in alts["run0-cpu"]
    assert "GPU 0: highest 2, mean 2, at the end 2" in alts["run0-gpu-memory"]
    assert "load process 1: highest 0.1, mean 0.1, at the end 0.1" in alts["run0-lag"]


def test_a_server_that_shows_nothing_gets_reasons_instead_of_pictures(make_run: MakeRun) -> None:
    reason = "this server tells no stages"
    hidden = {"detect_s": reason, "signal_s": reason}
    page = page_of(make_run(lifecycle=False, not_measurable=hidden))
    assert set(page.figures()) == {"run0-slots", "run0-cpu", "run0-lag"}
    body = body_of(page)
    assert body.count(reason) == 2  # once for all figures that it keeps away, and for the picture
    assert "detect_s, signal_s" in body
    assert "No step log, and no scrape showed the KV cache." in body
    titles = page.texts("h2")
    for title in ("Where the time of a cancel goes", "How long until the server let go"):
        assert title in titles


def test_a_run_without_requests_still_has_a_report(make_run: MakeRun) -> None:
    page = page_of(make_run(abandons=0))
    assert page.figures() == {}
    assert "No request was made" in body_of(page)


def test_several_runs_stand_side_by_side(make_run: MakeRun) -> None:
    page = page_of(make_run(), make_run(name="other", ghosts=6, question="And with ghosts?"))
    assert page.texts("h1") == ["2 runs, side by side"]
    assert "And with ghosts?" in page.texts("h2")
    assert {"run0-waste", "run1-waste"} <= set(page.figures())
    names = [attributes["id"] for _, attributes, _ in page.elements if attributes.get("id")]
    assert len(names) == len(set(names))


def test_side_by_side_a_run_that_proves_nothing_is_marked(make_run: MakeRun) -> None:
    invalid = {"validity": [{"level": "invalid", "text": "The client was too late."}]}
    page = page_of(
        make_run(),
        make_run(name="broken-off", status="target_failed"),
        make_run(name="invalid", status="interrupted", **invalid),
    )
    flags = ["".join(text) for tag, of, text in page.elements if tag == "small" and of.get("class")]
    assert flags == ["target failed", "invalid: its figures mean nothing"]


def damage_summary(run: Path) -> None:
    (run / "summary.json").write_text('{"run_id": ')


def misshape_summary(run: Path) -> None:
    (run / "summary.json").write_text('{"run_id": 7}')


def misshape_manifest(run: Path) -> None:
    (run / "manifest.json").write_text("[]")


def lose_steps(run: Path) -> None:
    (run / "steps.parquet").unlink()


def damage_requests(run: Path) -> None:
    (run / "requests.parquet").write_bytes(b"PAR1 not really")


@pytest.mark.parametrize(
    ("damage", "culprit"),
    [
        (damage_summary, "summary.json"),
        (misshape_summary, "summary.json"),
        (misshape_manifest, "manifest.json"),
        (lose_steps, "steps.parquet"),
        (damage_requests, "requests.parquet"),
    ],
)
def test_a_damaged_run_is_one_message(
    make_run: MakeRun,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    culprit: str,
) -> None:
    run = make_run()
    damage(run)
    assert main(["report", str(run), "-o", str(run / "report.html")]) == 2
    captured = capsys.readouterr()
    assert culprit in captured.err
    assert captured.out == ""
    assert not (run / "report.html").exists()


def test_an_unwritable_output_is_one_message(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    assert main(["report", str(run), "-o", str(run / "summary.json" / "report.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_command_line_says_where_the_report_is_or_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dashboards", "report", str(tmp_path / "none"), "-o", "x.html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "no such folder" in done.stderr
    assert "Traceback" not in done.stderr
