"""Time per token of the model `tiny` through the HTTP server, against llama.cpp's on a model of the
same shape, and with `--compile` against without it.

The servers run side by side, each on the cores that the system gives it, and are asked in turns.
llama.cpp is taken from LLAMA_SERVER, else the PATH, and needs the package gguf, which writes its
model. WALKAWAY_BEFORE names a folder with an older version of this engine to be compared with.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any, Final

import numpy as np

from reference_engine.model.shapes import MODEL_SHAPES
from tools.bench.ratio import BenchRatio, RatioLimit, UnavailableError, share, times_as_fast, within

_ROOT: Final = Path(__file__).parents[2]
_AT_MOST: Final = {1: 1.3, 4: 0.9, 8: 0.9}  # times llama.cpp's time per token, with --compile
_AT_LEAST_BEFORE: Final = 1.1
_WARM_TOKENS: Final = 5
_COLD_S: Final = 240.0
_CACHED_S: Final = 10.0
_READY_S: Final = 60.0


@dataclass(frozen=True)
class ServedLoad:
    streams: int
    prompt_tokens: int
    answer_tokens: int
    rounds: int


class ServedEngine:
    def __init__(self, port: int, started_s: float) -> None:
        self.port, self.started_s = port, started_s

    def ms_per_token(self, asked: ServedLoad, salt: str) -> float:
        """The mean over the streams, which begin together; prompts differ, so none is cached."""
        together, found = threading.Barrier(asked.streams), list[float]()

        def stream(number: int) -> None:
            prompt = f"{salt} {number} ".ljust(asked.prompt_tokens, "x")
            connection = http.client.HTTPConnection("127.0.0.1", self.port)
            together.wait()
            stamps = _stream(connection, prompt, asked.answer_tokens)[_WARM_TOKENS:]
            found.append(1e3 * (stamps[-1] - stamps[0]) / (len(stamps) - 1))

        threads = [threading.Thread(target=stream, args=(n,)) for n in range(asked.streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return mean(found)


def _stream(connection: http.client.HTTPConnection, prompt: str, num_tokens: int) -> list[float]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer, stamps = connection.getresponse(), list[float]()
    while line := answer.readline():
        if line.startswith(b"data: {"):
            stamps.append(perf_counter())
    connection.close()
    return stamps[:num_tokens]


@contextmanager
def engine(*flags: str, tree: Path = _ROOT, cache: str | None = None) -> Iterator[ServedEngine]:
    command = [sys.executable, "-m", "reference_engine", "--port", "0", "--exit-with-stdin"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    environment |= {} if cache is None else {"XDG_CACHE_HOME": cache}
    started, pipe = perf_counter(), subprocess.PIPE
    with subprocess.Popen(
        [*command, "--device", "cpu", *flags], cwd=tree, env=environment, stdin=pipe, stdout=pipe
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield ServedEngine(int(ready["url"].rpartition(":")[2]), perf_counter() - started)


@contextmanager
def llama_cpp(streams: int, context: int) -> Iterator[ServedEngine]:
    program = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if program is None:
        raise UnavailableError("needs llama.cpp: name its llama-server with LLAMA_SERVER")
    if find_spec("gguf") is None:
        raise UnavailableError("needs gguf, to write llama.cpp's model: pip install gguf")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        model, port = Path(folder) / "tiny.gguf", free.getsockname()[1]
        write_gguf(model)
        free.close()
        options = ["--alias", "tiny", "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
        sizes = ["--parallel", str(streams), "--ctx-size", str(streams * context)]
        command = [program, "-m", str(model), *options, *sizes, "--device", "none"]
        null, started = subprocess.DEVNULL, perf_counter()
        with subprocess.Popen(command, stdout=null, stderr=null) as process:
            try:
                while not _is_ready(port):
                    if process.poll() is not None or perf_counter() - started > _READY_S:
                        raise UnavailableError(f"{program} does not serve: try it by hand")
                    threading.Event().wait(0.1)
                yield ServedEngine(port, perf_counter() - started)
            finally:
                process.terminate()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def write_gguf(file: Path) -> None:
    """Random weights in float32. A byte of the prompt is a token; bytes are never sampled."""
    gguf: Any = import_module("gguf")
    shape, random = MODEL_SHAPES["tiny"], np.random.default_rng(0)
    specials = ["<pad>", "<s>", "</s>"]
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's names of bytes
    others = iter(range(256, 512))
    letters = [chr(byte if byte in visible else next(others)) for byte in range(256)]
    words = [f"\u0120w{n}" for n in range(shape.vocab_size - len(specials) - len(letters))]
    model = gguf.GGUFWriter(file, "llama")
    model.add_context_length(8192)
    model.add_embedding_length(shape.hidden_size)
    model.add_block_count(shape.num_layers)
    model.add_feed_forward_length(shape.ffn_size)
    model.add_head_count(shape.num_heads)
    model.add_head_count_kv(shape.num_kv_heads)
    model.add_layer_norm_rms_eps(shape.norm_eps)
    model.add_rope_freq_base(shape.rope_theta)
    model.add_file_type(gguf.LlamaFileType.ALL_F32)
    model.add_tokenizer_model("gpt2")
    model.add_tokenizer_pre("gpt-2")
    model.add_token_list([*specials, *letters, *words])
    kinds = [gguf.TokenType.CONTROL] * len(specials)
    model.add_token_types(kinds + [gguf.TokenType.NORMAL] * (shape.vocab_size - len(kinds)))
    model.add_token_merges(["a b"])  # there must be one; its result is no token
    model.add_eos_token_id(2)
    model.add_add_bos_token(False)

    def add(name: str, *size: int, std: float = 0.02, quiet: int = 0) -> None:
        weights = (random.standard_normal(size) * std).astype(np.float32)
        weights[:quiet] = 0.0
        model.add_tensor(f"{name}.weight", weights)

    hidden, ffn, keys = shape.hidden_size, shape.ffn_size, shape.num_kv_heads * shape.head_dim
    add("token_embd", shape.vocab_size, hidden)
    add("output", shape.vocab_size, hidden, std=0.4, quiet=len(specials) + len(letters))
    model.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for number in range(shape.num_layers):
        for name in ("attn_norm", "ffn_norm"):
            model.add_tensor(f"blk.{number}.{name}.weight", np.ones(hidden, np.float32))
        for name, size in {
            "attn_q": (hidden, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, hidden),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }.items():
            add(f"blk.{number}.{name}", *size)
    model.write_header_to_file()
    model.write_kv_data_to_file()
    model.write_tensors_to_file()
    model.close()


def served_speed(*, quick: bool = False) -> Iterator[BenchRatio]:
    tokens, rounds = (20, 2) if quick else (200, 9)
    short = [ServedLoad(streams, 16, tokens, rounds) for streams in _AT_MOST]
    long = ServedLoad(8, 64 if quick else 2000, 30 if quick else 100, 2 if quick else 5)
    with tempfile.TemporaryDirectory() as cache, ExitStack() as stack:
        with engine("--compile", cache=cache) as first:
            yield within("--compile: start, cold", "s", [first.started_s], _COLD_S)
        ours = stack.enter_context(engine("--compile", cache=cache))
        yield within("--compile: start from its cache", "s", [ours.started_s], _CACHED_S)
        servers = {"--compile": ours, "eager": stack.enter_context(engine())}
        if before := os.environ.get("WALKAWAY_BEFORE"):
            servers["before"] = stack.enter_context(engine(tree=Path(before)))
        unavailable = None
        try:
            servers["llama.cpp"] = stack.enter_context(llama_cpp(max(_AT_MOST), 4096))
        except UnavailableError as error:
            unavailable = error
        for asked in short:
            yield from _compare(asked, _measure(servers, asked))
        both = {name: servers[name] for name in ("--compile", "eager")}
        ms = _measure(both, long)
        name = f"{long.streams} streams of {long.prompt_tokens} tokens: --compile / eager"
        yield share(name, "ms", ms["--compile"], ms["eager"], RatioLimit("at most", 1.0))
    if unavailable is not None:
        raise unavailable


def _measure(servers: Mapping[str, ServedEngine], asked: ServedLoad) -> dict[str, list[float]]:
    """One round more, which warms up, is not counted."""
    found: dict[str, list[float]] = {name: [] for name in servers}
    for number in range(asked.rounds + 1):
        for name, server in servers.items():
            found[name].append(server.ms_per_token(asked, f"{number}"))
    return {name: ms[1:] for name, ms in found.items()}


def _compare(asked: ServedLoad, ms: Mapping[str, list[float]]) -> Iterator[BenchRatio]:
    """Our time is the numerator where a bound is on the ratio of the times."""
    name = f"{asked.streams} stream{'s' * (asked.streams > 1)}"
    yield share(f"{name}: --compile / eager", "ms", ms["--compile"], ms["eager"])
    if "before" in ms:
        title = f"{name}: eager, as fast as before"
        yield times_as_fast(title, "ms", ms["eager"], ms["before"], _AT_LEAST_BEFORE)
    if "llama.cpp" in ms:
        bound = RatioLimit("at most", _AT_MOST[asked.streams])
        yield share(f"{name}: --compile / llama.cpp", "ms", ms["--compile"], ms["llama.cpp"], bound)
        yield share(f"{name}: eager / llama.cpp", "ms", ms["eager"], ms["llama.cpp"])
