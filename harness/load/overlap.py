"""Whether streams ran at the same time on the server, as their client saw it: pure, from rows.

A server gives a token to everybody in its batch at each step. So if all streams had their first
token while each still had some to come, there was a step with all of them in it: each had a batch
slot of its own.
"""

from collections.abc import Sequence

from harness.records import RequestRow


def ran_at_once(rows: Sequence[RequestRow]) -> bool:
    """Whether every stream had a token before any had its last but one.

    Not its last: a client that is busy may take a last token and the first one of the stream that
    was admitted in its place, a step later, in the wrong order.
    """
    times = [row.token_times_ns for row in rows]
    if any(len(of_row) < 2 for of_row in times):
        return False
    return max(of_row[0] for of_row in times) < min(of_row[-2] for of_row in times)
