"""What an experiment raises where it has no figure."""


class RefusedError(Exception):
    """The server does not offer this: 404, 405, 400, or no such counter. Never a timeout."""


class CannotDecideError(Exception):
    """Nothing can be said; the message says why."""


class HarnessError(CannotDecideError):
    """Our own side failed: the client was late or broke the protocol, or its process ended."""


class TooQuickError(Exception):
    """What a client could leave is over so soon that leaving it matters to nobody; the message has
    the figure."""
