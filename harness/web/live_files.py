"""The files of the live page, and what a browser is told to allow them: their own script, style and
figures, and nothing from anywhere else."""

from pathlib import Path
from typing import Final

FILES: Final = {  # by what their addresses end in
    "live": Path(__file__).with_name("live.html"),
    "live.js": Path(__file__).with_name("live.js"),
    "live.css": Path(__file__).with_name("live.css"),
}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
