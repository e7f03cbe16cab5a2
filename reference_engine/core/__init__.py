"""Scheduling, decided without tensors, clocks, threads or an event loop."""
