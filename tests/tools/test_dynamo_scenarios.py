"""Our runtime in the scenarios that Dynamo's went through; docs/dynamo.md has both."""

from typing import Any

import pytest

from tools.side_by_side.dynamo_scenarios import CASES, DynamoCase, run

SIGNAL = {"stop": "stop", "stopped before": "stop", "hold": "", "read on": ""}
END = dict.fromkeys(("never looks", "awaits", "has no context", "has a last word"), "closed")
OTHERS = {  # the middle's signal and end, then the leaf's
    "raises CancelledError": ("stop", "raised CancelledError"),
    "raises": ("", "raised ValueError"),
    "stops itself": ("stop", "looked"),
    "dies": ("", None),
}
ERRORS = {
    DynamoCase("read on", "raises", "direct"): "HandlerError: ValueError: a mistake of the leaf",
    DynamoCase("read on", "dies", "direct"): "the serving process is gone (connection_dropped)",
}


def expected(case: DynamoCase) -> dict[str, tuple[str, str | None]]:
    """A call that is passed the context gets the caller's signal; any other one is killed, if it
    ends early. A leaf that looks ends by itself, any other one is closed.
    """
    signal = SIGNAL.get(case.way, "kill")
    ends_early = signal != ""
    leaf = (
        ("kill" if ends_early and case.tier == "passes not" else signal),
        (END.get(case.leaf, "looked") if ends_early else "ran out"),
    )
    if case.leaf == "has no context":
        leaf = "", "closed"
    leaf_seen = OTHERS.get(case.leaf, leaf)
    if case.tier == "direct":
        return {"leaf": leaf_seen}
    middle = "closed" if ends_early and case.tier == "passes not" else "its stream ended"
    if case.leaf == "raises":
        middle = "raised HandlerError"
    return {"leaf": leaf_seen, "middle": (signal, middle)}


@pytest.mark.e2e
def test_signals_and_ends_are_those_of_the_table_in_the_documents(capfd: Any) -> None:
    found = run("reference_engine.dynamo", quick=True)
    seen = {
        case: {
            process: (told.get("signal", ""), told.get("how"))
            for process, told in found[case.name].items()
            if process != "caller" and told
        }
        for case in CASES
    }
    assert seen == {case: expected(case) for case in CASES}
    for case in CASES:
        caller = found[case.name]["caller"]
        assert caller["signal"] == SIGNAL.get(case.way, ""), case
        if case.way == "task":
            assert caller["error"] == "CancelledError"
        elif case.way != "process killed":
            assert (caller["error"] != "") == (case.leaf in ("raises", "dies")), case
    for case, message in ERRORS.items():
        assert message in found[case.name]["caller"]["error"]
    logged = capfd.readouterr().err
    assert logged.count("lab.leaf.generate failed") == 3  # each mistake of the leaf once
    assert logged.count("lab.middle.generate failed") == 2
