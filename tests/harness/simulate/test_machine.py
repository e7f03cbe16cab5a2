"""Machine files: what is refused, and what a shipped one must say."""

from itertools import product
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.simulate.machine import SHIPPED_MACHINES, load_machine
from harness.workload.workload import shipped
from reference_engine.config import StepCost
from tools.truth import machines

WHOLE = """
title = "A desk"
kind = "assumed"
gpus = 1
lags_from = "live-simulated"

[cost]
fixed_s = 0.01
prefill_token_s = 1e-5
decode_token_s = 1e-6
context_token_s = 1e-8
swap_block_s = 0

[range]
running = [1, 64]
"""


def _load(path: Path, text: str) -> None:
    path.write_text(text)
    load_machine(str(path))


@pytest.mark.parametrize("name", sorted(shipped(SHIPPED_MACHINES)))
def test_a_shipped_machine_names_its_sources_or_is_an_assumption(name: str) -> None:
    machine = load_machine(name)
    assert machine.lags is not None
    assert machine.kind == "assumed" or machine.sources
    if machine.kind in ("floor", "published"):
        assert machine.model
        assert machine.engine.num_blocks
        assert any("http" in source for source in machine.sources)


def test_another_machines_lags_are_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "desk.toml"
    path.write_text(WHOLE)
    assert load_machine(str(path)).lags == load_machine("live-simulated").lags


def test_a_step_is_the_sum_of_its_terms(tmp_path: Path) -> None:
    path = tmp_path / "desk.toml"
    path.write_text(WHOLE)
    step_s = load_machine(str(path)).cost.step_s(prefill=1000, decode=10, context=100_000)
    assert step_s == pytest.approx(0.01 + 0.01 + 1e-5 + 0.001)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("decode_token_s = 1e-6", "", "key `cost.decode_token_s` is missing"),
        ("prefill_token_s = 1e-5", "prefill_token_s = -1e-5", "`cost.prefill_token_s` must be at"),
        ("fixed_s = 0.01", "fixed_s = 0", "`cost.fixed_s` must be more than 0"),
        ('kind = "assumed"', 'kind = "published"', "must name its `sources`"),
        ('lags_from = "live-simulated"', "", "either a section [lags] or `lags_from`"),
        ('"live-simulated"', '"nothing"', "nothing"),
        ("swap_block_s", "swop_block_s", "did you mean `swap_block_s`?"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", r"\[").replace("?", r"\?")):
        _load(tmp_path / "desk.toml", WHOLE.replace(old, new))


def test_an_unknown_machine_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="live-simulated"):
        load_machine("h1000")


def test_a_measured_runner_is_slower_than_it_was_told() -> None:
    beyond = load_machine("live-simulated")
    assert beyond.adds_to_stated
    told = beyond.on_top_of({"decode_token_s": 0.001}, name="told")
    assert told.cost.fixed_s == beyond.cost.fixed_s + StepCost().fixed_s
    assert told.cost.decode_token_s == beyond.cost.decode_token_s + 0.001
    assert told.lags == beyond.lags


def test_steps_beyond_the_fit_are_named(tmp_path: Path) -> None:
    path = tmp_path / "desk.toml"
    path.write_text(WHOLE)
    covered = load_machine(str(path)).range
    assert covered.beyond({"running": (1, 64), "batched_tokens": (1, 9999)}) == []
    (said,) = covered.beyond({"running": (0, 65)})
    assert said == "running 0 to 65, where the cost model covers 1 to 64"


@pytest.mark.parametrize(("gpu", "shape", "gpus"), machines.MACHINES)
def test_the_shipped_floors_are_what_their_formula_gives(
    gpu: machines.Gpu, shape: machines.Shape, gpus: int
) -> None:
    path = machines.FOLDER / machines.file_name("floor", gpu, shape)
    cost = machines.floor(gpu, shape, gpus)
    text = machines.as_toml("floor", gpu, shape, gpus, cost, machines.FLOOR_REMARKS)
    assert path.read_text() == text


def test_a_floor_reads_the_weights_once_a_step_and_the_cache_once_a_token() -> None:
    floor = machines.floor(machines.H100, machines.LLAMA_70B, 4)
    assert machines.LLAMA_70B.parameters == 70_553_706_496
    assert floor["fixed_s"] == pytest.approx(139e9 / (4 * 3.35e12), rel=0.001)
    assert floor["context_token_s"] == pytest.approx(327_680 / (4 * 3.35e12))


@pytest.mark.parametrize(("gpu", "shape", "gpus"), machines.MACHINES)
def test_nothing_published_is_faster_than_the_floor(
    gpu: machines.Gpu, shape: machines.Shape, gpus: int
) -> None:
    floor, published = (
        load_machine(machines.file_name(kind, gpu, shape).removesuffix(".toml")).cost
        for kind in ("floor", "published")
    )
    for decode, each in product((1, 16, 64, 256), (128, 1024)):
        step = {"prefill": 0, "decode": decode, "context": decode * each}
        assert published.step_s(**step) > floor.step_s(**step)
