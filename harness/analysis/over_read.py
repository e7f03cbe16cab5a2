"""How far clients read past the moment at which they were to leave: part of the measurement floor.

A client that leaves reads first what has arrived already: it counts as read, and t0 comes after it.
So no waste is wrong by it, but who asked for cancels after so many tokens is told how many more it
was. A client that is slow, or a server that sends many tokens at once, makes it large.
"""

from typing import Final

import numpy as np
import pandas as pd

from harness.analysis.figure import Figures, NotMeasurable, Sample, describe, rate
from harness.analysis.token_times import read_after, without_tokens
from harness.records import Delivery, Outcome, Way, WireClose

_NOBODY: Final = "nobody left a stream by plan"


def over_read_figures(requests: pd.DataFrame) -> Figures:
    """over_read_tokens: tokens read at t0 - tokens that the plan allows, of each request left.

    The plan allows `planned_abandon` tokens, or as many as came before the planned moment, if that
    is more: `think_ns` after the last token planned for (after the sending, where none was).
    `others.unread_at_t0`: of those who closed (way "fin"), the share with bytes still unread in the
    kernel, which makes a reset of it.
    """
    plain = without_tokens(requests)
    has_left = (
        (plain["outcome"] == Outcome.ABANDONED)
        & (plain["delivery"] == Delivery.STREAM)
        & plain["planned_abandon"].notna()
        & plain["think_ns"].notna()
    ).to_numpy(dtype=bool)
    if not has_left.any():
        return {"over_read_tokens": NotMeasurable(_NOBODY)}
    left = plain[has_left]
    planned = left["planned_abandon"].to_numpy(dtype=np.int64)
    think_ns = left["think_ns"].to_numpy(dtype=np.int64)
    sent_ns = left["sent_ns"].to_numpy(dtype=np.int64)
    over = read_after(requests, has_left, planned, pause_ns=think_ns, sent_ns=sent_ns)
    figure = describe(Sample(values=over), unit="tokens", method="client")
    closed = left[left["way"] == Way.FIN]
    if len(closed):
        unread = int((closed["wire_close"] == WireClose.RST).sum())
        figure.others["unread_at_t0"] = rate(unread, len(closed), method="client")
    return {"over_read_tokens": figure}
