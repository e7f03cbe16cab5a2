"""The transformer, and a simulated runner that only takes its time."""
