"""What the load process is told to do: one JSON file, written by `harness.run`, read by the users.

The load runs in a process of its own (Locust monkey-patches the process that imports it), so
everything it needs to know is here, resolved: no defaults are filled in on the other side.
"""

from pathlib import Path

import msgspec


class AbandonLoad(msgspec.Struct, kw_only=True, tag="abandon", tag_field="kind"):
    """Closed-loop users who open streams and leave: each sends its next request when one ended.

    A share `stay_share` reads to the end of `stay_tokens`; the others ask for `answer_tokens` (long
    enough that a server which goes on can be told from one that finished) and leave after a number
    of tokens drawn from `abandon_after_tokens`, plus the think time. With 0 the think time begins
    when the request is sent, and they leave wherever the answer stands then: no headers yet, no
    token yet, or some tokens already (which count as read).
    `think` is "step" (uniform over one observed gap between tokens), "none", or seconds (uniform
    from 0). The load ends after `stop_after_abandons` abandons, or when the plan's time is up.
    """

    abandon_after_tokens: list[int]
    stay_share: float
    think: str | float
    prompt_tokens: tuple[int, int]
    answer_tokens: int
    stay_tokens: int
    stop_after_abandons: int | None


class SlotRecoveryLoad(msgspec.Struct, kw_only=True, tag="slot_recovery", tag_field="kind"):
    """One director: fill the slots, queue a probe, abandon one, time the probe's first token.

    `trials` of each arm, interleaved: `unloaded` (the probe alone), `abandon`, and `control`
    (nobody leaves). `slots` is the server's number of batch slots: before each trial as many short
    requests must run at once, or the trial is void.
    """

    slots: int
    trials: int
    prompt_tokens: tuple[int, int]
    answer_tokens: int
    control_answer_tokens: int
    probe_tokens: int
    abandon_after_tokens: int


class LoadPlan(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole order.

    `continuous_usage` says that each event carries the token count so far. `rows_dir` must exist;
    null keeps no rows. `timeout_s` is the longest wait for the next byte, also when connecting, and
    no limit on a whole request: one that keeps bringing tokens may take any time.
    """

    url: str
    path: str
    model: str
    api_key_env: str | None
    headers: dict[str, str]
    extra_body: dict[str, int | float | str | bool]
    stream_options: dict[str, bool] | None
    continuous_usage: bool
    rows_dir: str | None
    seed: int
    arm: str
    users: int
    timeout_s: float
    max_seconds: float
    load: AbandonLoad | SlotRecoveryLoad


def read_plan(path: Path) -> LoadPlan:
    """Read a plan that `write_plan` wrote. Raises `msgspec.ValidationError` for anything else."""
    return msgspec.json.decode(path.read_bytes(), type=LoadPlan)


def write_plan(plan: LoadPlan, path: Path) -> None:
    """Write the plan as indented JSON, for the load process and for whoever looks later."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")
