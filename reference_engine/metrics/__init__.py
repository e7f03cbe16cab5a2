"""The frontend's counts, and the page `/metrics`."""
