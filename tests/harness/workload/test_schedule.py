"""Arrivals are resolved for the server, a trace is found and read, or refused before the start."""

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.run.load_plan import count_arrivals, describe_open_loop, open_loop_notes
from harness.run.run_config import RunConfig, make_load_plan, resolve_run
from harness.workload.arrivals import TraceArrivals
from harness.workload.load import AbandonLoad
from harness.workload.plan import LoadPlan
from harness.workload.workload import Workload, load_workload
from tests.harness.plans import server
from tests.harness.workload.test_refused import GOOD

HEAD = GOOD.replace("max_seconds = 5", "max_seconds = 100").replace("[8, 16]", "[8, 2000]")
HEAD = HEAD.replace("[0, 4]", "[1]").replace("stay_tokens = 10", "stay_tokens = 50")
TRACE = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
0,ChatGPT,4000,18,4018,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
80,GPT-4,417,276,693,API log
"""


def workload(folder: Path, arrivals: str, *settings: str, more: str = "") -> Workload:
    path = folder / "mine.toml"
    path.write_text(f"{HEAD}\n[arrivals]\n{arrivals}\n{more}\n")
    return load_workload(str(path), settings)


def plan(folder: Path, arrivals: str, *settings: str, context: int | None = None) -> LoadPlan:
    workload(folder, arrivals)
    resolved = resolve_run(RunConfig(workload=str(folder / "mine.toml"), settings=list(settings)))
    config = None if context is None else {"max_model_len": context}
    return make_load_plan(resolved, server(config), rows_dir=folder)


def replay(
    folder: Path, more: str = "", *, context: int | None = None
) -> tuple[TraceArrivals, AbandonLoad]:
    (folder / "mine.csv").write_text(TRACE)
    found = plan(folder, f'kind="trace"\nfile="mine.csv"\n{more}', context=context)
    assert isinstance(found.arrivals, TraceArrivals)
    assert isinstance(found.load, AbandonLoad)
    return found.arrivals, found.load


def test_a_schedule_is_counted_and_a_setting_opens_the_loop(tmp_path: Path) -> None:
    closed = plan(tmp_path, 'kind="closed"')
    assert closed.schedule is None
    assert count_arrivals(closed) == 0
    settings = ("arrivals.kind=constant", "arrivals.rate=3", "arrivals.seconds=4")
    opened = plan(tmp_path, 'kind="closed"', *settings, "arrivals.max_streams=5000")
    assert count_arrivals(opened) == 12
    assert opened.schedule is not None
    said = "about 12 arrivals in 4 s, at most 5,000 streams at once"
    assert describe_open_loop(opened.schedule) == said


def test_arms_may_differ_in_their_arrivals(tmp_path: Path) -> None:
    """One of another kind has its keys alone."""
    arms = "".join(f'[[arms]]\nname="{r}"\n[arms.arrivals]\nrate={r}\n' for r in (2, 4))
    closed = '[[arms]]\nname="0"\n[arms.arrivals]\nkind="closed"\n'
    workload(tmp_path, 'kind="constant"\nrate=1\nseconds=1', more=arms + closed)
    order = RunConfig(
        workload=str(tmp_path / "mine.toml"), settings=["run.processes=3", "run.users=3"]
    )
    resolved = resolve_run(order)
    for run, arrivals in zip(resolved.arm_runs, (2, 4, 0), strict=True):
        of_arm = make_load_plan(resolved.for_arm(run, out=tmp_path), server(), rows_dir=tmp_path)
        assert (of_arm.arm, of_arm.run.processes, count_arrivals(of_arm)) == (run.arm, 3, arrivals)


@pytest.mark.parametrize(
    ("more", "context", "longest", "factor"),
    [
        ("from_s=1\nseconds=90\nspeed=3", None, 2000, 1),
        ("", 1100, 1000, 1),  # with room for the longest answer
        ('prompt_factor="fit"', None, 2000, 0.5),
        ('prompt_factor="fit"', 300, 200, 0.05),
        ('prompt_factor="fit"\nfrom_s=50', None, 2000, 1),  # never longer
    ],
)
def test_prompts_are_fitted_to_the_load_and_the_context(
    tmp_path: Path, more: str, context: int | None, longest: int, factor: float
) -> None:
    with pytest.raises(ConfigError, match="room for prompts of 7, but"):
        replay(tmp_path, more, context=107)
    trace, load = replay(tmp_path, more, context=context)
    assert (load.prompt_tokens, load.stay_tokens) == ([8, longest], 50)
    assert trace.prompt_factor == factor
    assert trace.file == str(tmp_path / "mine.csv")


def test_a_note_counts_what_the_replay_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace is also found from the current directory."""
    (there := tmp_path / "there").mkdir()
    (there / "mine.csv").write_text(TRACE)
    monkeypatch.chdir(there)
    asked = plan(tmp_path, 'kind="trace"\nfile="mine.csv"')
    assert open_loop_notes(asked) == [
        "trace mine.csv: 2 requests; prompts cut to 2,000 tokens: 1 (45.3 % of all prompt "
        "tokens lost); answers cut to 50 tokens: 1 (76.9 % of all answer tokens lost); "
        "left out without a prompt or an answer: 1"
    ]
    assert count_arrivals(asked) == 2


def test_a_trace_replayed_too_fast_is_refused(tmp_path: Path) -> None:
    """Eight a second as recorded, at the edges of the second too."""
    trace = tmp_path / "trace.jsonl"
    lines = (f'{{"timestamp":{125 * n},"input_length":9,"output_length":3}}' for n in range(40))
    trace.write_text("\n".join(lines))

    def at_speed(speed: int) -> RunConfig:
        settings = [f"arrivals.file={trace}", "run.most_rate=8", f"arrivals.speed={speed}"]
        return RunConfig(workload="trace_replay", settings=settings)

    resolve_run(at_speed(1))
    with pytest.raises(ConfigError, match=r"trace.jsonl: `arrivals` bring up to 16 .*most_rate=16"):
        resolve_run(at_speed(2))
