"""What can be asked about a request, and asked of it, while it lives and for a while after.

A request has three names: the engine's (`req-7`), its answer's (`cmpl-req-7`, `chatcmpl-req-7`) and
its client's own X-Request-Id. Names match whole. A client's own id may be shared by several: then
it means all that live, or of the ended ones the latest. The requests of another API key do not
exist.
"""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reference_engine.cancellation import CancelReason
from reference_engine.frontend.chunks import AnswerWriter, usage
from reference_engine.frontend.client_request import ClientRequest
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.worker_link import WorkerLink


class RequestsApi:
    """The endpoints under `/v1/requests`."""

    def __init__(self, link: WorkerLink) -> None:
        self._link = link

    def routes(self) -> list[Route]:
        return [
            Route("/v1/requests/{name:path}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/requests/{name:path}/ping", self.ping, methods=["POST"]),
            Route("/v1/requests/{name:path}", self.show),
        ]

    async def show(self, request: Request) -> Response:
        """The latest request of that name: how it stands, or stood when it ended."""
        found = self._found(request)[-1]
        writer = AnswerWriter(found)
        if found.is_ended and found.is_aborted:
            body = writer.whole([choice.text for choice in found.choices])
        else:
            choices = [
                {
                    "index": choice.index,
                    "finish_reason": choice.finish_reason,
                    "tokens_generated": choice.num_generated,
                }
                for choice in found.choices
            ]
            body = {**writer.head, "choices": choices, "usage": usage(found)}
        return _json({**facts(found), **body})

    async def cancel(self, request: Request) -> Response:
        """Cancel every live request of that name. Asked again, it says the same about them."""
        answers = []
        for found in self._found(request):
            cancelled = self._link.cancel(found, CancelReason.API)
            answers.append({**facts(found), "cancelled": cancelled})
        has_cancelled = any(answer["cancelled"] for answer in answers)
        name = request.path_params["name"]
        return _json({"id": name, "cancelled": has_cancelled, "requests": answers})

    async def ping(self, request: Request) -> Response:
        """The client is still there. `keep_alive_s`: the bound for its next ping, if it has one."""
        live = [found for found in self._found(request) if not found.is_ended]
        if not live:
            raise ApiError(404, "this request has ended", code="request_ended")
        for found in live:
            self._link.ping(found)
        bounds = {found.request_id: found.keep_alive_s for found in live}
        return _json({"id": request.path_params["name"], "keep_alive_s": bounds})

    def _found(self, request: Request) -> list[ClientRequest]:
        """At least one, oldest first. Raises ApiError 404."""
        owner = getattr(request.state, "owner", None)
        found = find(self._link, request.path_params["name"], owner)
        if not found:
            raise ApiError(404, "no such request, or it is no longer known", code="unknown_request")
        return found


def find(link: WorkerLink, name: str, owner: str | None) -> list[ClientRequest]:
    """The owner's requests of that name: one by the engine's or answer's name, else by its own."""
    now_ns = link.now_ns()
    request_id = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
    request = link.live.get(request_id) or link.archive.by_id(request_id, now_ns)
    if request is not None and request.owner == owner and name in (request_id, request.answer_id):
        return [request]
    live = [r for r in link.live.values() if (r.client_request_id, r.owner) == (name, owner)]
    if live:
        return live
    latest = link.archive.latest_of(name, owner, now_ns)
    return [] if latest is None else [latest]


def facts(request: ClientRequest) -> dict[str, Any]:
    """How a request stands. `cancellation`: the first, whether or not it came in time."""
    cancellation = request.token.cancellation
    endings = [choice.ending for choice in request.choices if choice.ending is not None]
    return {
        "id": request.answer_id,
        "request_id": request.request_id,
        "client_request_id": request.client_request_id,
        "status": request.status,
        "phase": request.phase,
        "tokens_generated": request.num_generated,
        "preemptions": sum(ending.num_preemptions for ending in endings),
        "cancellation": None
        if cancellation is None
        else {
            "reason": cancellation.reason,
            "method": cancellation.method,
            "t_ns": cancellation.t_ns,
        },
    }


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
