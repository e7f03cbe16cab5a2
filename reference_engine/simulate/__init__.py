"""The engine in virtual time: its own scheduler, cache, faults and way of a cancel, no waiting."""
