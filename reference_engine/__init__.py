"""The bundled engine: small enough to read, real enough to measure.

Two processes. The frontend (`frontend/`) speaks OpenAI's HTTP dialect and watches its clients; the
worker (`worker/`) owns the scheduler (`core/`) and the model (`model/`). They exchange framed
messages (`protocol`) over one socket pair, and each dies when the other does.
"""
