"""Does the server still serve after all that? By its own account, and by what became of a few short
requests (`harness.serving`).

Wedged is a server that calls itself healthy and gives no answer at all: a load balancer would go on
sending users there. One that answers wrongly (an error, an empty answer) is not, and is told of in
its own words.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

_OF_ITSELF: Final = {
    True: "calls itself healthy",
    False: "calls itself ill",
    None: "has no /health",
}


def is_wedged(probing: Mapping[str, Any]) -> bool | None:
    """Does the server call itself healthy and yet leave requests without an answer? None where
    nobody asked, or where no answer came from a server that says nothing of its health."""
    if not probing:
        return None
    if not probing["errors"] or not _is_silent(probing):
        return False
    return None if probing["healthy"] is None else bool(probing["healthy"])


def health_warnings(probing: Mapping[str, Any]) -> Iterator[str]:
    """What is to be said of a server that did not serve all of the short requests."""
    if not probing or not probing["errors"]:
        return
    error, state = probing["errors"][0], _OF_ITSELF[probing["healthy"]]
    if not _is_silent(probing):
        yield (f"after the settle time the server answers short requests with: {error}; it {state}")
        return
    what = "wedged: " if is_wedged(probing) else ""
    yield (
        f"{what}after the settle time {len(probing['errors'])} of {probing['sent']} short requests "
        f"were not answered ({error}), and the server {state}"
    )


def _is_silent(probing: Mapping[str, Any]) -> bool:
    return bool(probing.get("is_silent", True))
