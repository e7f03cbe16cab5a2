"""The frontend process: HTTP on one side, its workers on the other; and the launcher of several."""
