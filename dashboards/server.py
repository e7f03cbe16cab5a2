"""What is known of the server, in words."""

from collections.abc import Mapping
from typing import Any, Final

SHOWN: Final = (
    ("runner", "{} runner"),
    ("device", "on {}"),
    ("max_num_seqs", "{:,} slots"),
    ("num_blocks", "{:,} KV blocks"),
    ("block_size", "{:,} tokens a block"),
)


def server_in_words(engine: str, config: Mapping[str, Any]) -> str:
    """ "reference, simulated runner, 16 slots": the engine, and what it tells of its `config`."""
    details = [form.format(config[key]) for key, form in SHOWN if config.get(key) is not None]
    return ", ".join([engine, *details])
