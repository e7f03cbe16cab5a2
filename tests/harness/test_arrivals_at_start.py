"""What a workload says about arrivals is written out, or refused before anything is sent."""

from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.run.run_config import RunOrder, make_load_plan, resolve_order
from harness.run.schedule import count_arrivals, describe_open_loop, open_loop_notes
from harness.run.server import Server
from harness.workload.arms import arm_runs
from harness.workload.arrivals import RateArrivals, Stretch
from harness.workload.plan import LoadPlan, OpenLoop
from harness.workload.traces import TraceReplay
from harness.workload.workload import Workload, load_workload

HEAD = """
question = "?"
[run]
users = 1
max_seconds = 100
[load]
kind = "abandon"
abandon_after_tokens = [1]
stay_share = 0.5
prompt_tokens = [8, 2000]
answer_tokens = 100
stay_tokens = 50
"""
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
    resolved = resolve_order(RunOrder(workload=str(folder / "mine.toml"), settings=list(settings)))
    config = None if context is None else {"max_model_len": context}
    server = Server(url="http://127.0.0.1:1", model="m", config=config, engine=None)
    return make_load_plan(resolved, server, rows_dir=folder)


def open_loop(folder: Path, arrivals: str, *settings: str, context: int | None = None) -> OpenLoop:
    found = plan(folder, arrivals, *settings, context=context).open_loop
    assert found is not None
    return found


def replay(folder: Path, more: str = "", *, context: int | None = None) -> TraceReplay:
    (folder / "mine.csv").write_text(TRACE)
    found = open_loop(folder, f'kind="trace"\nfile="mine.csv"\n{more}', context=context).schedule
    assert isinstance(found, TraceReplay)
    return found


@pytest.mark.parametrize(
    ("arrivals", "stretches", "burstiness"),
    [
        ('kind="constant"\nrate=2\nseconds=5', [(5, 2, 2)], None),
        ('kind="poisson"\nrate=2\nseconds=5', [(5, 2, 2)], 1.0),
        ('kind="gamma"\nrate=2\nseconds=5\nburstiness=0.25', [(5, 2, 2)], 0.25),
        ('kind="ramp"\nfrom_rate=0\nto_rate=9\nseconds=5', [(5, 0, 9)], 1.0),
        (
            'kind="steps"\nsteps=[{rate=2,seconds=5},{rate=0,seconds=1}]\nspacing="even"',
            [(5, 2, 2), (1, 0, 0)],
            None,
        ),
        ('kind="ramp"\nfrom_rate=1\nto_rate=1\nseconds=5\nspacing=4', [(5, 1, 1)], 4.0),
    ],
)
def test_each_kind_is_a_rate_and_a_spacing(
    tmp_path: Path,
    arrivals: str,
    stretches: list[tuple[float, float, float]],
    burstiness: float | None,
) -> None:
    found = open_loop(tmp_path, arrivals)
    assert found.max_streams == 1000
    assert found.schedule == RateArrivals(
        stretches=[Stretch(seconds=s, from_rate=a, to_rate=b) for s, a, b in stretches],
        burstiness=burstiness,
    )


def test_without_arrivals_users_are_a_closed_loop(tmp_path: Path) -> None:
    closed = plan(tmp_path, 'kind="closed"')
    assert closed.open_loop is None
    assert count_arrivals(closed) == 0
    assert load_workload("demo").arrivals.kind == "closed"


def test_a_setting_opens_the_loop_and_raises_the_cap(tmp_path: Path) -> None:
    found = open_loop(
        tmp_path,
        'kind="closed"',
        *("arrivals.kind=constant", "arrivals.rate=3", "arrivals.seconds=4"),
        "arrivals.max_streams=5000",
    )
    assert found.max_streams == 5000
    assert describe_open_loop(found) == "about 12 arrivals in 4 s, at most 5,000 streams at once"


def test_the_schedule_is_counted_as_it_will_be_sent(tmp_path: Path) -> None:
    assert count_arrivals(plan(tmp_path, 'kind="constant"\nrate=2\nseconds=5')) == 10


@pytest.mark.parametrize(
    ("arrivals", "message"),
    [
        ('kind="often"', "`arrivals.kind` must be one of 'closed', 'constant'"),
        ('kind="poisson"\nseconds=5', "key `arrivals.rate` is missing"),
        ('kind="poisson"\nrate=0\nseconds=5', "`arrivals.rate` must be more than 0"),
        ('kind="poisson"\nrate=2e6\nseconds=5', "`arrivals.rate` must be at most 1000000"),
        ('kind="poisson"\nrate=1\nseconds=101', "arrivals come for 101 s, but the load ends after"),
        ('kind="gamma"\nrate=1\nseconds=1\nburstiness=0', "`arrivals.burstiness` must be at least"),
        ('kind="ramp"\nfrom_rate=0\nto_rate=0\nseconds=1', "0 arrivals are expected"),
        ('kind="steps"\nsteps=[]', "`arrivals.steps` must have at least 1"),
        ('kind="steps"\nsteps=[{rate=1}]', "key `arrivals.steps.0.seconds` is missing"),
        (
            'kind="ramp"\nfrom_rate=1\nto_rate=2\nseconds=1\nspacing="odd"',
            'must be "even", "poisson"',
        ),
        ('kind="trace"\nfile="f"\nprompt_factor="big"', 'must be "fit" or a number above 0'),
        ('kind="trace"\nfile="f"\nspeed=0', "`arrivals.speed` must be more than 0"),
        (
            'kind="constant"\nrate=1\nseconds=1\nmax_streams=0',
            "`arrivals.max_streams` must be at l",
        ),
        ('kind="closed"\nrate=1', "unknown key `arrivals.rate`; allowed: kind"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, arrivals: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(tmp_path, arrivals)


def test_only_users_who_ask_once_can_come_by_a_schedule(tmp_path: Path) -> None:
    poisson = 'kind="poisson"\nrate=1\nseconds=1'
    for setting in ("load.canaries=1", 'load.ask_again_after=["abandoned"]'):
        with pytest.raises(ConfigError, match="need users who ask again"):
            workload(tmp_path, poisson, setting)
    settings = ["arrivals.kind=poisson", "arrivals.rate=1", "arrivals.seconds=1"]
    with pytest.raises(ConfigError, match='"poisson" needs `load'):
        load_workload("cancel_storm", settings)


def test_arms_may_differ_in_their_arrivals(tmp_path: Path) -> None:
    arms = "".join(f'[[arms]]\nname="{r}"\n[arms.arrivals]\nrate={r}\n' for r in (2, 4))
    asked = workload(tmp_path, 'kind="constant"\nrate=1\nseconds=1', more=arms)
    runs = arm_runs(asked, source="mine.toml")
    assert [run.workload.arrivals.model_dump()["rate"] for run in runs] == [2, 4]
    order = RunOrder(workload=str(tmp_path / "mine.toml"), settings=["run.processes=3"])
    resolved = resolve_order(order)
    server = Server(url="http://127.0.0.1:1", model="m", config=None, engine=None)
    for run, arrivals in zip(resolved.arm_runs, (2, 4), strict=True):
        of_arm = make_load_plan(resolved.for_arm(run, out=tmp_path), server, rows_dir=tmp_path)
        assert (of_arm.arm, of_arm.processes, count_arrivals(of_arm)) == (run.arm, 3, arrivals)
    with pytest.raises(ConfigError, match="every arm has its own"):
        arm_runs(asked, source="mine.toml", settings=["arrivals.rate=9"])


def test_an_arm_with_arrivals_of_another_kind_has_its_keys_alone(tmp_path: Path) -> None:
    arms = '[[arms]]\nname="a"\n[[arms]]\nname="b"\n[arms.arrivals]\nkind="closed"\n'
    asked = workload(tmp_path, 'kind="constant"\nrate=1\nseconds=1', more=arms)
    kinds = [run.workload.arrivals.kind for run in arm_runs(asked, source="mine.toml")]
    assert kinds == ["constant", "closed"]


class TestTraces:
    def test_lengths_are_limited_by_the_load(self, tmp_path: Path) -> None:
        found = replay(tmp_path, "from_s=1\nseconds=90\nspeed=3")
        assert (found.prompt_tokens, found.answer_tokens) == ((8, 2000), 50)
        assert (found.from_s, found.seconds, found.speed, found.prompt_factor) == (1, 90, 3, 1)
        assert found.file == str(tmp_path / "mine.csv")

    def test_prompts_are_fitted_to_the_context_beside_the_longest_answer(
        self, tmp_path: Path
    ) -> None:
        assert replay(tmp_path, context=1100).prompt_tokens == (8, 1000)
        with pytest.raises(ConfigError, match="room for prompts of 7, but"):
            replay(tmp_path, context=107)

    def test_fit_makes_the_longest_prompt_fit_and_never_longer(self, tmp_path: Path) -> None:
        assert replay(tmp_path, 'prompt_factor="fit"').prompt_factor == 0.5
        assert replay(tmp_path, 'prompt_factor="fit"', context=300).prompt_factor == 0.05
        only_short = 'prompt_factor="fit"\nfrom_s=50'
        assert replay(tmp_path, only_short).prompt_factor == 1

    def test_what_was_changed_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "mine.csv").write_text(TRACE)
        asked = plan(tmp_path, 'kind="trace"\nfile="mine.csv"')
        assert open_loop_notes(asked) == [
            "trace mine.csv: 2 requests; prompts cut to 2,000 tokens: 1 (45.3 % of all prompt "
            "tokens are gone); answers cut to 50 tokens: 1 (76.9 % of all answer tokens are gone); "
            "left out, as they have no prompt or no answer: 1"
        ]
        assert count_arrivals(asked) == 2

    @pytest.mark.parametrize(
        ("more", "message"),
        [
            ('file="nowhere.csv"', "nowhere.csv: the trace cannot be read"),
            ('file="mine.csv"\nfrom_s=81', "no request with a prompt and an answer lies in"),
            (
                'file="mine.csv"\nspeed=0.5',
                "takes 160 s, but the load ends after `run.max_seconds`",
            ),
            ('file="broken.csv"', r"broken.csv:4: `Request tokens` is 'x', not a number of tokens"),
        ],
    )
    def test_a_mistake_is_said_before_anything_is_started(
        self, tmp_path: Path, more: str, message: str
    ) -> None:
        (tmp_path / "mine.csv").write_text(TRACE)
        (tmp_path / "broken.csv").write_text(TRACE.replace("417", "x"))
        workload(tmp_path, f'kind="trace"\n{more}')
        with pytest.raises(ConfigError, match=message):
            resolve_order(RunOrder(workload=str(tmp_path / "mine.toml")))

    def test_a_trace_named_on_the_command_line_is_found_from_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        there = tmp_path / "there"
        there.mkdir()
        (there / "mine.csv").write_text(TRACE)
        monkeypatch.chdir(there)
        found = open_loop(tmp_path, 'kind="trace"\nfile="mine.csv"').schedule
        assert isinstance(found, TraceReplay)
        assert found.file == str(there / "mine.csv")
