"""What an experiment raises where it has no figure."""


class RefusedError(Exception):
    """The server does not offer this: 404, 405, 400, or no such counter. Never a timeout."""


class CannotDecideError(Exception):
    """Nothing can be said; the message says why."""
