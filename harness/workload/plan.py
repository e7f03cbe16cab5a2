"""The plan of a load: one JSON file, written by the run, read by the load process: the workload's
own sections, resolved, and facts about the server.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from harness.errors import ConfigError
from harness.records import Protocol
from harness.workload.arrivals import AnyArrivals, ClosedArrivals, OpenArrivals
from harness.workload.event_scale import Counted
from harness.workload.load import AbandonLoad, AnyLoad
from harness.workload.prompts import BYTES_ARE_TOKENS, PromptScale
from harness.workload.schedule import Arrival, planned_arrivals
from harness.workload.target import Target
from harness.workload.values import TomlTable
from harness.workload.workload import RunSettings

ONLY_ARM: Final = "main"  # of a workload without arms


class LoadPlan(TomlTable):
    """`urls`: of all frontends, if there are several, which share the users evenly. `rows_dir` must
    exist; None keeps no rows. Prompts follow from `run.seed` and `prompt_salt`, all other draws
    from the seed alone. `left_open_outlive`: connections that users left open end with standard
    input, not before. Users, arrivals and abandons count all `run.processes` together.
    `counted_answers`: from the check before the load, to learn the tokens in an event of a stream;
    with `learns_events` the load's own answers are learned from, too."""

    url: str
    urls: list[str] = Field(default_factory=list)
    address: str | None = None  # of the server's host, as the run found it; None: not yet known
    model: str
    target: Target
    run: RunSettings
    load: AnyLoad | None  # None: the requests are directed by the cases of a conformance suite
    protocol: Annotated[Protocol, Field(strict=False)] = Protocol.HTTP
    arrivals: AnyArrivals = ClosedArrivals()
    arm: str = ONLY_ARM
    api_key_env: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)
    ca_file: str | None = None
    rows_dir: str | None = None
    left_open_outlive: bool = False
    prompt_scale: PromptScale = BYTES_ARE_TOKENS
    prompt_salt: str = ""
    counted_answers: list[Counted] = Field(default_factory=list)
    learns_events: bool = True

    @property
    def schedule(self) -> OpenArrivals | None:
        return None if isinstance(self.arrivals, ClosedArrivals) else self.arrivals

    def planned_arrivals(self) -> Iterator[Arrival]:
        if self.schedule is None:
            return iter(())
        assert isinstance(self.load, AbandonLoad)
        return planned_arrivals(self.schedule, self.load, seed=self.run.seed)

    @property
    def stop_after_abandons(self) -> int | None:
        return self.load.stop_after_abandons if isinstance(self.load, AbandonLoad) else None

    def with_seed(self, seed: int) -> "LoadPlan":
        return self.model_copy(update={"run": self.run.model_copy(update={"seed": seed})})

    def at(self, url: str) -> "LoadPlan":
        """The plan for another server, whose address is not known yet."""
        return self.model_copy(update={"url": url, "urls": [], "address": None})

    def without_secrets(self) -> "LoadPlan":
        """The plan for files that are kept: a header may hold a secret."""
        return self.model_copy(update={"headers": dict.fromkeys(self.headers, "***")})


def read_plan(path: Path) -> LoadPlan:
    return LoadPlan.model_validate_json(path.read_bytes())


def write_plan(plan: LoadPlan, path: Path) -> None:
    path.write_text(plan.model_dump_json(indent=2) + "\n")


def plan_from_mark(kept: dict[str, Any], *, source: str) -> LoadPlan:
    """A plan as a load process kept it with its rows. Raises ConfigError for one that was written
    before version 0.1.0, or is damaged; `source` names the file."""
    try:
        return LoadPlan.model_validate(kept, strict=False)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ConfigError(
            f"{source}: the key `{key}` of its plan cannot be read: the file is damaged, or older "
            "than version 0.1.0; collect it with the walkaway that wrote it"
        ) from error
