"""uvicorn's HTTP/1.1 protocol, less pipelining.

While an earlier answer is being generated, uvicorn stops reading a connection on which the next
request has already come, and does not tell the running one that the connection has closed: its
client could leave unseen. No client of this dialect pipelines; one that does is cut off.
"""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class NoPipelining(HttpToolsProtocol):
    """One request at a time on a connection."""

    def on_headers_complete(self) -> None:
        earlier: RequestResponseCycle | None = self.cycle  # None before the first request
        if earlier is not None and not earlier.response_complete:
            self.transport.abort()
        else:
            super().on_headers_complete()
