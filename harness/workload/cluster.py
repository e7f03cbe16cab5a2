"""`[simulate]`: the cluster of a simulation: its machine, its replicas behind a router, and their
outages. `walkaway run` has one server, and refuses the section."""

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from harness.workload.values import Duration, Seconds, Share, TomlTable

MOST_REPLICAS: Final = 100_000

Router = Literal["random", "round_robin", "least_loaded", "prefix_affine"]
# A router that does not look at the load: each replica's arrivals are known beforehand.
UNLOOKING: Final = ("random", "round_robin")
Replicas = Annotated[int, Field(ge=1, le=MOST_REPLICAS)]


class Outage(TomlTable):
    """At `at_s` a `share` of the replicas goes: `die` at once, with all their requests, or `drain`:
    take no new request and go when the last has ended. `rolling`: one after the other. Each is back
    `back_after_s` after it went; absent: never."""

    at_s: Seconds
    kind: Literal["die", "drain"]
    share: Annotated[Share, Field(gt=0)]
    back_after_s: Duration | None = None
    rolling: bool = False


class ClusterSettings(TomlTable):
    """`replicas` share the whole load. Only `simulated` of them are computed, with their part;
    absent: all. `keep`: `thin` rows have no lists of tokens, so that an hour at scale fits."""

    machine: Annotated[str, Field(min_length=1)] | None = None
    replicas: Replicas = 1
    simulated: Replicas | None = None
    router: Router = "random"
    keep: Literal["rows", "thin"] = "rows"
    outages: list[Outage] = Field(default_factory=list)

    @property
    def num_simulated(self) -> int:
        return self.replicas if self.simulated is None else self.simulated

    @property
    def share(self) -> float:
        return self.num_simulated / self.replicas

    @model_validator(mode="after")
    def _must_hold_together(self) -> Self:
        if self.num_simulated > self.replicas:
            raise ValueError(
                f"`simulated` is {self.num_simulated}, but there are only {self.replicas} "
                "`replicas`"
            )
        for outage in self.outages:
            if outage.rolling and outage.back_after_s is None:
                raise ValueError(
                    f"the rolling outage at {outage.at_s:g} s needs `back_after_s`: the next "
                    "replica goes when one is back"
                )
        return self
