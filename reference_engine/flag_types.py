"""What the values of flags mean; each refuses others as argparse wants it."""

import argparse
import math
import re
from typing import Final

from reference_engine.dynamo.discovery import read_path
from reference_engine.serve.settings import WorkerAddress

MAX_PORT: Final = 65535
MAX_PROCESSES: Final = 64


def as_bytes(text: str) -> int:
    """GB are 10^9 bytes, GiB 2^30."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?(?:([kMGT])(i?)B?|B?)", text, re.ASCII)
    if found is None or not (size := int(float(found[1]) * _unit(found[2], found[3]))):
        raise argparse.ArgumentTypeError(f"a size is a number of bytes such as 8GB, not {text!r}")
    return size


def _unit(prefix: str | None, binary: str | None) -> int:
    unit = 1024 if binary else 1000
    return math.prod([unit] * " kMGT".index(prefix or " "))


def as_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise argparse.ArgumentTypeError(f"a share is above 0 and at most 1, not {text!r}")
    return share


def as_number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_PROCESSES:
        raise argparse.ArgumentTypeError(f"a number from 1 to {MAX_PROCESSES}, not {text!r}")
    return int(text)


def as_endpoint(text: str) -> str:
    try:
        return read_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def as_address(text: str) -> WorkerAddress:
    host, _, port = text.rpartition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"an address is HOST:PORT, not {text!r}")
    return WorkerAddress(host=host.removeprefix("[").removesuffix("]"), port=as_port(port))


def as_port(text: str) -> int:
    if not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"a port is a number from 0 to {MAX_PORT}, not {text!r}")
    return int(text)
