"""The bundled engine: small enough to read, real enough to measure.

A frontend (`serve/`) speaks OpenAI's HTTP dialect (`api/`) and watches its clients; a worker
(`worker/`) owns its scheduler (`core/`) and its model (`model/`). They exchange framed messages
(`protocol`) over one connection. One of each end together; of several, each outlives the others.
"""

from reference_engine.context import Context

__all__ = ["Context"]
