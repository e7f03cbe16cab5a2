"""The sections about those who left: stages, latency, waste, recovery."""

from dashboards import figures
from dashboards.section import Picture, Section, median_and_p99, why_not
from dashboards.source import Run
from dashboards.words import figure_of
from harness.analysis.cancellation import was_cancelled
from harness.analysis.recovery import probes


def stages(run: Run) -> Section:
    section = Section(
        name="stages",
        title="Where the time of a cancel goes",
        shows="From the user's leaving to the last block given back, stage by stage. Each stage is "
        "summarised on its own, so a row need not add up to the cancel latency.",
        good="detect and signal well below a step, wait at most the step in progress, free next to "
        "nothing.",
    )
    present = {name: run.metrics[name] for name, _, _ in figures.STAGES if name in run.metrics}
    if not any(metric.n for metric in present.values()):
        names = tuple(name for name, _, _ in figures.STAGES)
        return section.without(why_not(run, names, "This server tells no stages of a cancel."))
    unknown = [name[:-2] for name, one in present.items() if one.p99 is None]
    medians = ", ".join(f"{name[:-2]} {figure_of(one, 'p50')}" for name, one in present.items())
    return section.drawn(
        Picture(
            name="stages",
            figure=figures.cancel_stages(present),
            alt=f"Stacked bars of the stages of a cancel. Medians: {medians}.",
            note=f"Not drawn, because some requests never got so far while they were watched: "
            f"99th percentile of {', '.join(unknown)}."
            if unknown
            else None,
        )
    )


def latency(run: Run) -> Section:
    section = Section(
        name="cancel-latency",
        title="How long until the server let go",
        shows="The share of abandoned requests whose slot and blocks were free again, by time "
        "since the user left. A request never let go of (a ghost) stays in the count, as a cross "
        "where the watching ended.",
        good="a steep line that reaches 100 % within one or two engine steps.",
    )
    if not was_cancelled(run.cancels).any():
        return section.without(
            why_not(run, ("cancel_latency_s",), "This server does not tell when it lets go.")
        )
    pictures = [
        Picture(
            name="cancel-latency",
            figure=figures.cancel_latency(run.cancels),
            alt="Share of abandoned requests let go of, by time since the user left. "
            + median_and_p99(run.metrics.get("cancel_latency_s")),
        )
    ]
    is_let_go = ~run.cancels["censored"].astype(bool)
    if run.cancels.loc[is_let_go, "cancel_latency_steps"].notna().any():
        pictures.append(
            Picture(
                name="cancel-steps",
                figure=figures.cancel_steps(run.cancels),
                alt="Bars: abandoned requests by the number of engine steps until let go. "
                + median_and_p99(run.metrics.get("cancel_latency_steps")),
                note="The same in engine steps, so that a slow machine and a fast one compare; "
                "ghosts are left out here.",
            )
        )
    return section.drawn(*pictures)


def waste(run: Run) -> Section:
    section = Section(
        name="waste",
        title="Tokens for nobody, by when the user left",
        shows="Mean tokens per abandoned request that were generated and never read.",
        good="the same small bars wherever the user leaves; after the close no more than the one "
        "step in flight.",
    )
    points = run.summary.breakdown.get("waste_by_abandon_point") or []
    if not points:
        names = ("wasted_after_close_tokens", "wasted_in_flight_tokens", "wasted_tokens")
        return section.without(
            why_not(run, names, "This server does not tell what it generated for each request.")
        )
    return section.drawn(
        Picture(
            name="waste",
            figure=figures.waste_by_abandon_point(points),
            alt="Stacked bars of wasted tokens for each abandon point. "
            + median_and_p99(run.metrics.get("wasted_tokens")),
        )
    )


def recovery(run: Run) -> Section:
    section = Section(
        name="recovery",
        title="How soon the slot worked for somebody else",
        shows="A probe waits for a slot. Each dot is one trial: from the moment a user left to the "
        "probe's first token (abandon), the probe on an idle server (unloaded), and the same queue "
        "when nobody leaves (control). The box holds the middle half, its line is the median.",
        good="abandon close to unloaded, and far from control.",
    )
    waited = probes(run.frames.requests)
    if waited.empty:
        return section.without("No trial of this run is valid.")
    return section.drawn(
        Picture(
            name="recovery",
            figure=figures.slot_recovery(waited),
            alt="One dot for each trial in three rows: unloaded, abandon and control. Recovery: "
            + median_and_p99(run.metrics.get("slot_recovery_s")),
        )
    )
