"""The state that all users of a load process share: plan, client, rows, number of abandons."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Final

import httpx

from harness.client.conversation import LoadClient
from harness.client.exchange import StreamClient
from harness.client.shards import ShardWriter
from harness.client.wire_log import WireLog
from harness.http_client import http_client, request_headers
from harness.place import Place
from harness.records import Outcome, Protocol, RequestRow
from harness.workload.abandon import RequestSpec
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.plan import LoadPlan
from harness.workload.prompts import PromptScale, paged_prompt, prompt
from harness.workload.session import ChatMessage

_MOST_OF_A_USER: Final = 1 << 32  # requests


def asking_client(plan: LoadPlan, longest_s: float) -> httpx.Client:
    """A client for questions to the load's server that are no load. `longest_s`: of a whole
    answer."""
    return http_client(
        request_headers(plan.headers, plan.api_key_env),
        ca_file=plan.ca_file,
        timeout_s=longest_s,
        longest_s=longest_s,
        place=Place(plan.url, plan.address),
    )


class LoadSession:
    """`tell` is called with every row, for Locust's own statistics; `enough` once, when the plan's
    number of abandons is reached; `give_up`, with the reason, when the load cannot continue."""

    def __init__(
        self,
        plan: LoadPlan,
        *,
        api_key: str | None,
        tell: Callable[[RequestRow], None],
        enough: Callable[[], None],
        give_up: Callable[[str], None],
        wire: WireLog | None = None,
    ) -> None:
        self.plan = plan
        self._like_this = partial(
            LoadSession, api_key=api_key, tell=tell, enough=enough, give_up=give_up, wire=wire
        )
        self.client = _client(plan, api_key, give_up, wire)
        self.seen = ObservedLatency()
        load = plan.load
        self.canary_barrier = CanaryBarrier(load.canaries if isinstance(load, AbandonLoad) else 0)
        self._rows_dir = None if plan.rows_dir is None else Path(plan.rows_dir)
        self._rows: ShardWriter[RequestRow] | None = None
        if self._rows_dir is not None:
            self._rows = ShardWriter(self._rows_dir, RequestRow, os.getpid())
        self._tell = tell
        self._enough = enough
        self.give_up = give_up
        self._stop_after = plan.stop_after_abandons
        self.abandons = 0
        self.sent = 0
        # Not from the seed: to a server that outlives this run the ids must be new.
        self._tag = secrets.token_hex(4)

    def with_plan(self, plan: LoadPlan) -> "LoadSession":
        """Another session of the same load, with another plan."""
        return self._like_this(plan)

    def issue(self, spec: RequestSpec, *, intended_start_ns: int | None = None) -> RequestSpec:
        self.sent += 1
        now_ns = time.perf_counter_ns()
        return replace(
            spec,
            request_id=spec.request_id or f"walkaway-{self._tag}-{spec.user}-{self.sent}",
            arm=spec.arm or self.plan.arm,
            intended_start_ns=now_ns if intended_start_ns is None else intended_start_ns,
        )

    def prompt(self, spec: RequestSpec, *, n: int) -> str:
        scale, shared = self.plan.prompt_scale, spec.shared_tokens
        if spec.text is not None:
            return spec.text.prompt(spec.prompt_tokens, scale)
        return prompt(
            seed=self.plan.run.seed,
            salt=self.plan.prompt_salt,
            user=spec.user,
            n=n,
            num_bytes=scale.num_bytes(spec.prompt_tokens),
            shared_bytes=scale.num_bytes(shared) if shared else 0,
        )

    def other_documents(self, spec: RequestSpec, *, n: int) -> list[ChatMessage]:
        """The documents of a request except its prompt, each as long, and unlike any other."""
        of_each = (replace(spec, user=-1 - at, text=None) for at in range(spec.documents - 1))
        number = spec.user * _MOST_OF_A_USER + n
        return [ChatMessage("user", self.prompt(one, n=number)) for one in of_each]

    def paged_prompt(self, pages: Sequence[int], *, page_tokens: float, tokens: int) -> str:
        scale = self.plan.prompt_scale
        return paged_prompt(
            pages,
            seed=self.plan.run.seed,
            salt=self.plan.prompt_salt,
            page_bytes=page_tokens * scale.bytes_per_token,
            num_bytes=scale.num_bytes(tokens),
        )

    def keep(self, row: RequestRow) -> None:
        if self._rows is not None:
            try:
                self._rows.write(row)
            except OSError as error:
                self.give_up(f"the rows of this load can no longer be written: {error.strerror}")
        self._tell(row)
        self.seen.observe(row)
        if row.outcome is Outcome.ABANDONED:
            self.abandons += 1
            if self.abandons == self._stop_after:
                self._enough()

    def close(self) -> None:
        self.client.close()
        if self._rows is not None:
            self._rows.close()


def _client(
    plan: LoadPlan, api_key: str | None, give_up: Callable[[str], None], wire: WireLog | None
) -> LoadClient:
    if plan.protocol is not Protocol.GRPC:
        return StreamClient(plan, api_key=api_key, give_up=give_up, wire=wire)
    from harness.client.kserve import KServeClient  # its packages are an extra

    return KServeClient(plan, api_key=api_key, wire=wire)


# A canary is a user with a known answer, so that a change in it shows. It repeats one prompt and
# asks for the most likely tokens. A server whose arithmetic does not depend on the batch owes it an
# equal answer each time, whatever the other users do. It learns the answer before any other user
# comes. Its prompt is equal in all rounds and arms, whatever their seed.
_CANARY_SEED: Final = 0


def canary_prompt(user: int, *, tokens: int, scale: PromptScale) -> str:
    return prompt(seed=_CANARY_SEED, user=user, n=0, num_bytes=scale.num_bytes(tokens))


class CanaryBarrier:
    """Orders the first requests: one canary after the other, then all other users. Users are
    numbered from 0, the canaries first."""

    def __init__(self, canaries: int) -> None:
        self._answered = [Event() for _ in range(canaries)]

    def wait_for_turn(self, user: int) -> None:
        for answered in self._answered[:user]:
            answered.wait()

    def end_turn(self, user: int) -> None:
        if user < len(self._answered):
            self._answered[user].set()
