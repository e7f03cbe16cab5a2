"""The bundled engine: small enough to read, real enough to measure.

Two processes. The frontend (`serve/`) speaks OpenAI's HTTP dialect (`api/`) and watches its
clients; the worker (`worker/`) owns the scheduler (`core/`) and the model (`model/`). They exchange
framed messages (`protocol`) over one connection, and each ends when the other does.
"""

from reference_engine.context import Context

__all__ = ["Context"]
