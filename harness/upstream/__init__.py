"""The bundled upstream: a server that stands behind a gateway and writes down what it saw.

    connection ─▶ exchange ─▶ scheduler (slots, steps) ─▶ events of the dialect ─▶ connection
         └────────────┴──────────────▶ truth: a log of each request, live and as a file

It computes nothing: the n-th token of every answer is the word " wn", so that a missing one shows.
"""
