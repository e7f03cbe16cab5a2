"""The bundled engine: small enough to read, real enough to measure.

A frontend (`serve/`) speaks OpenAI's HTTP dialect (`api/`) and watches its clients; a worker
(`worker/`) owns its scheduler (`core/`) and its model (`model/`). They exchange framed messages
(`protocol`) over one connection. A single frontend and its single worker end together; of several
processes, each outlives the loss of another.
"""

from reference_engine.context import Context

__all__ = ["Context"]
