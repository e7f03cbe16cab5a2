"""The pages are true: each key with its default, each flag; links and commands exist."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.main import get_command

from harness.commands.index import app
from harness.records import Trust, Way
from harness.run.run_config import RunConfig, resolve_run
from harness.simulate import machine
from harness.workload import arrivals as arrival_settings
from harness.workload import load as load_settings
from harness.workload.abandon import AbandonPlan, AnyPlan
from harness.workload.cluster import ClusterSettings, Outage
from harness.workload.session import SessionSettings
from harness.workload.target import KServeSource, MetricRole, MetricSource, Target, TensorSource
from harness.workload.workload import (
    SHIPPED_TARGETS,
    SHIPPED_WORKLOADS,
    ArmSettings,
    ArmTarget,
    CollectSettings,
    EngineSettings,
    GateSettings,
    RunSettings,
    SettleSettings,
    ValueSettings,
    Workload,
    load_target,
    load_workload,
    shipped,
)
from reference_engine.flags import build_parser
from tests.harness.documents import (
    PAGES,
    README,
    ROOT,
    blocks,
    code_in,
    commands,
    links,
    table_rows,
)

DOCS = ROOT / "docs"
WORKLOADS, TARGETS, COMMAND_LINE, MACHINES = (
    DOCS / f"{name}.md" for name in ("workloads", "targets", "command-line", "machines")
)
EVERY = [README, *PAGES, *sorted((DOCS / "conform").glob("*.md"))]
HELP = ("-h", "--help")
IS_PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b")

SECTIONS: Mapping[tuple[Path, str], type[BaseModel]] = {
    (WORKLOADS, "### `[run]`"): RunSettings,
    (WORKLOADS, '### `[load]` with `kind = "abandon"`'): load_settings.AbandonLoad,
    (WORKLOADS, "### Sessions: `[load.session]`"): SessionSettings,
    (WORKLOADS, '### `[load]` with `kind = "slot_recovery"`'): load_settings.SlotRecoveryLoad,
    (WORKLOADS, '### `[load]` with `kind = "occupancy"`'): load_settings.OccupancyLoad,
    (WORKLOADS, '### `[load]` with `kind = "chunk_frontier"`'): load_settings.ChunkFrontierLoad,
    (WORKLOADS, '### `[load]` with `kind = "cancel_storm"`'): load_settings.CancelStormLoad,
    (WORKLOADS, "### `[engine]`"): EngineSettings,
    (WORKLOADS, "### `[settle]`"): SettleSettings,
    (WORKLOADS, "### `[collect]`"): CollectSettings,
    (WORKLOADS, "### `[simulate]`"): ClusterSettings,
    (WORKLOADS, "### `[[simulate.outages]]`"): Outage,
    (WORKLOADS, "### `[[arms]]`"): ArmSettings,
    (WORKLOADS, "### `[arms.target]`"): ArmTarget,
    (WORKLOADS, "### `[gate]`"): GateSettings,
    (WORKLOADS, "### `[value]`"): ValueSettings,
    (TARGETS, "## The keys"): Target,
    (TARGETS, "### `[kserve]`"): KServeSource,
    (TARGETS, "### Inputs of `[kserve]`"): TensorSource,
    (TARGETS, "### The roles"): MetricSource,
    (MACHINES, "### `[cost]`"): machine.Cost,
    (MACHINES, "### `[range]`"): machine.Covered,
    (MACHINES, "### `[engine]`"): machine.EngineDefaults,
    (MACHINES, "### `[lags]`"): machine.Lags,
    (MACHINES, "### `[lags.growth]`"): machine.Growth,
    (MACHINES, "### `[error]`"): machine.FitError,
}


def default_of(field: FieldInfo) -> str:
    """As the pages write it."""
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    match default:
        case None:
            return "absent"
        case bool():
            return f"`{str(default).lower()}`"
        case str():
            return f'`"{default}"`'
        case BaseModel():
            return "`{}`"
        case float() | int():
            return f"`{default:g}`"
        case _:
            return f"`{default}`"


def keys_with_defaults(model: type[BaseModel]) -> dict[str, str]:
    return {name: default_of(field) for name, field in model.model_fields.items()}


def documented_keys(page: Path, heading: str) -> dict[str, str]:
    """The rows of the first columns: key and default."""
    rows = [cells for cells in table_rows(page, heading) if len(cells) == 3]
    return {code_in(key)[0]: default for key, default, _ in rows}


@pytest.mark.parametrize(("page", "heading"), SECTIONS)
def test_every_key_is_documented_with_its_default(page: Path, heading: str) -> None:
    model = SECTIONS[page, heading]
    more = {"name": "the file's"} if model is Target else {}
    assert documented_keys(page, heading) == keys_with_defaults(model) | more


def test_every_section_of_a_workload_is_documented() -> None:
    at_the_top = documented_keys(WORKLOADS, "### At the top")
    sections = {*re.findall(r"^### `\[+([a-z]+)\]+`", WORKLOADS.read_text(), re.MULTILINE)}
    assert at_the_top.keys() | sections == Workload.model_fields.keys()
    assert at_the_top["headlines"] == default_of(Workload.model_fields["headlines"])


def test_every_way_and_plan_of_a_mix_is_documented() -> None:
    common = {**AbandonPlan.model_fields}
    common.pop("plan")
    rows = [(code_in(key)[0], rest) for key, *rest in table_rows(WORKLOADS, "### `[[load.mix]]`")]
    of_all, others = dict(rows[: len(common)]), dict(rows[len(common) :])
    assert {key: of_all[key][0] for key in of_all} == {
        key: default for key, default in keys_with_defaults(AbandonPlan).items() if key in common
    }
    entries = get_args(get_args(AnyPlan)[0])
    plans = {}
    for entry in entries:
        (plan,) = get_args(entry.model_fields["plan"].annotation)
        plans[plan] = {key for key in entry.model_fields if key not in common and key != "plan"}
    documented = {plan: {code.split()[0] for code in code_in(others[plan][0])} for plan in plans}
    assert documented == plans
    heads = {"plan", "way"}
    assert others.keys() == {*heads, *plans, *Way}


def test_every_key_of_arrivals_is_documented() -> None:
    documented = {
        code_in(kind)[0]: " ".join(code_in(keys))
        for kind, keys, _ in table_rows(DOCS / "load.md", "## Arrivals")
    }
    for kind in get_args(get_args(arrival_settings.AnyArrivals)[0]):
        (name,) = get_args(kind.model_fields["kind"].annotation)
        keys = kind.model_fields.keys() - {"kind", "max_streams"}
        assert all(key in documented[name] for key in keys), name


def test_every_shipped_file_is_documented_as_it_describes_itself() -> None:
    def documented(page: Path, heading: str) -> dict[str, str]:
        rows = [cells for cells in table_rows(page, heading) if len(cells) == 2]
        return {code_in(name)[0]: text for name, text in rows}

    questions = {name: load_workload(name).question for name in shipped(SHIPPED_WORKLOADS)}
    assert documented(WORKLOADS, "# Workloads") == questions
    kinds = {name: load_target(name).description for name in shipped(SHIPPED_TARGETS)}
    assert documented(TARGETS, "# Targets") == kinds


def test_the_examples_load(tmp_path: Path) -> None:
    whole, of_settings, of_servers = (block.text for block in blocks(WORKLOADS, "toml"))
    mine = tmp_path / "mine.toml"
    mine.write_text(whole)
    assert resolve_run(RunConfig(workload=str(mine))).workload.run.users == 12
    for text in (of_settings, of_servers):
        run = whole if "[run]" not in text else whole.replace("[run]\n", "[run]\nrounds = 5\n")
        mine.write_text(run + text.replace("[run]\nrounds = 5\n", ""))
        assert len(resolve_run(RunConfig(workload=str(mine))).workload.arms) == 2
    (example,) = blocks(TARGETS, "toml")
    mine.write_text(example.text)
    target = load_target(str(mine))
    assert target.name == "mine"
    assert target.metrics["aborted"].labels == {"finished_reason": "abort"}


def test_every_role_and_each_trust_is_documented() -> None:
    names = {code_in(cells[0])[0] for cells in table_rows(TARGETS, "### The roles")}
    assert names == {*get_args(MetricRole), *MetricSource.model_fields, *get_args(Trust)}


# Pages, links, commands.


def test_every_page_is_linked_from_the_readme() -> None:
    documented = {(README.parent / link).resolve() for link in links(README)}
    assert not {page for page in PAGES if page.resolve() not in documented}


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    local = [link for link in links(page) if link and "://" not in link]
    assert not [link for link in local if not (page.parent / link).exists()]


def flags_by_command() -> dict[str, set[str]]:
    whole: Any = get_command(app)
    flags = {
        name: {option for parameter in one.params for option in (*parameter.opts,)}
        for name, one in whole.commands.items()
    }
    flags["engine"] = {
        option for action in build_parser()._actions for option in action.option_strings
    }
    return flags


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.name)
def test_every_command_in_a_page_can_be_given(page: Path) -> None:
    """Its flags exist, and its run takes its settings; but for what a reader has to put in."""
    known = flags_by_command()
    for _, command, *words in commands(page):
        if command.startswith("-") or IS_PLACEHOLDER.fullmatch(command):
            continue
        assert command in known, command
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        assert not [flag for flag in flags if flag not in {*known[command], *HELP}], words
        if command == "run" and words and words[0] in shipped(SHIPPED_WORKLOADS):
            values = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
            load_workload(words[0], [one for one in values if not IS_PLACEHOLDER.search(one)])


def test_every_command_and_flag_is_documented() -> None:
    flags = flags_by_command()
    rows = table_rows(COMMAND_LINE, "# The command line")
    assert {code.split()[0] for cells in rows for code in code_in(cells[0])} == flags.keys()
    words = [word for code in code_in(COMMAND_LINE.read_text()) for word in code.split()]
    documented = {word for word in words if word.startswith("-")}
    known = {flag for name, of in flags.items() if name != "engine" for flag in of}
    ours = {flag for flag in known if flag.startswith("-")}
    assert documented == ours | {*HELP, "--install-completion", "--show-completion"}
