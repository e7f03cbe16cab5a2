"""Handlers in Python and chains of them, with the calls of NVIDIA Dynamo's runtime."""
