"""The page of `walkaway simulate capacity`: what a load needs, by how cancels are treated."""

from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from dashboards.figures.look import (
    BLUE,
    NO_NAME,
    ORANGE,
    POINT_TEXT,
    VERMILION,
    axis,
    plain,
    styled,
    whiskers,
)
from dashboards.page import document, save
from dashboards.sections.section import Picture, Section, Table
from harness.store.capacity_result import CapacityResult, Estimate, Need, read_capacity
from harness.text.capacity import NEED_COLUMNS, need_cells, whole


def write_capacity(folder: Path, output: Path) -> None:
    result = read_capacity(folder)
    html = document(
        "capacity.html.j2",
        {"capacity": [_needs(result)]},
        result=result,
        sentence=_sentence(result),
        pictured_sections=[_needs(result)],
        machine=_machine(result.machine),
    )
    save(html, output)


def _needs(result: CapacityResult) -> Section:
    unit = "GPUs" if _are_gpus(result) else "replicas"
    said = "; ".join(f"{need.name}: {whole(_counted(need, result))}" for need in result.needs)
    return Section(
        name="needs",
        title=f"The {unit} that the load needs",
        shows=(
            f"{result.rate:,g} requests a second, divided by the most that a replica takes while "
            f"it holds {' and '.join(result.goal)}. Whiskers are 95 % intervals over the seeds."
        ),
        good="late and ignored are as low as honoured",
        pictures=(
            Picture(
                name="needs",
                figure=_bars(result, unit),
                alt=f"{unit} needed. {said}",
                note=f"Simulated with cost model {result.machine['name']}.",
            ),
        ),
        tables=(
            Table(
                title="What it takes",
                shows=(
                    "Replicas are not rounded up, and none is kept in reserve. Requests a second "
                    "are per replica, wasted tokens per cancel. “More” compares seed by seed."
                ),
                columns=NEED_COLUMNS,
                rows=tuple(need_cells(need) for need in result.needs),
            ),
        ),
    )


def _are_gpus(result: CapacityResult) -> bool:
    return all(need.gpus is not None for need in result.needs)


def _counted(need: Need, result: CapacityResult) -> Estimate:
    return need.gpus if need.gpus is not None and _are_gpus(result) else need.replicas


def _bars(result: CapacityResult, unit: str) -> go.Figure:
    bars = []
    for need, colour in zip(result.needs, (BLUE, ORANGE, VERMILION), strict=True):
        counted = _counted(need, result)
        bar = go.Bar(
            x=[need.name],
            y=[counted.value],
            error_y=whiskers([counted.value], [counted.ci95]),
            marker={"color": colour},
            showlegend=False,
            customdata=[plain(f"{need.name}: {whole(counted)} {unit}")],
            hovertemplate=POINT_TEXT + NO_NAME,
        )
        bars.append(bar)
    return styled(bars, x=axis("cancellation"), y=axis(unit))


def _sentence(result: CapacityResult) -> str:
    honoured, ignored = result.needs[0], result.needs[-1]
    unit = "GPUs" if _are_gpus(result) else "replicas"
    first, last = _counted(honoured, result), _counted(ignored, result)
    more = need_cells(ignored)[NEED_COLUMNS.index("more (95 %)")]
    return (
        f"With cancellation honoured the load needs {whole(first)} {unit}; ignored, {whole(last)}: "
        f"{more} more."
    )


def _machine(machine: dict[str, Any]) -> dict[str, Any]:
    cost = machine["cost"]
    return {
        "title": machine["title"],
        "kind": machine["kind"],
        "cost": ", ".join(f"{name} {value:.4g}" for name, value in cost.items()),
        "sources": machine["sources"],
    }
