"""The frontend process: HTTP on one side, the worker on the other."""
