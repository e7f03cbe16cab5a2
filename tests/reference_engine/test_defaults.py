"""Which device computes and what it serves: on made-up machines, through the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.defaults import MOST_BLOCKS
from reference_engine.device import Surroundings, missing_tools, read_torch_version
from reference_engine.flags import read_settings
from tests.reference_engine.fake_driver import (
    H100,
    H200,
    RTX_3070,
    RTX_3090,
    SMALL,
    T4,
    machine,
)

Machine = Callable[[], Surroundings]
CPU_BUILD = ("2.13.0+cpu", None)
NO_COMPILER = ("a C compiler (install gcc or clang)",)


def chosen(on: Machine, *flags: str) -> tuple[EngineConfig, str]:
    """The engine, and what is said of it on standard error."""
    said: list[str] = []
    settings = read_settings([*flags], {}, on, said.append)
    return settings.config, "\n".join(said)


@pytest.mark.parametrize(
    ("on", "flags", "expected"),
    [
        (machine(H200), [], ("cuda", "8b", "bfloat16", True)),
        (machine(H100), [], ("cuda", "8b", "bfloat16", True)),
        (machine(RTX_3090), [], ("cuda", "8b", "bfloat16", True)),
        (machine(RTX_3090), ["--num-blocks", "4096"], ("cuda", "1b", "bfloat16", True)),
        (machine(RTX_3090), ["--dtype", "float32"], ("cuda", "1b", "float32", True)),
        (machine(H100), ["--workers", "4"], ("cuda", "8b", "bfloat16", True)),
        (machine(H100), ["--workers", "3", "--disaggregated"], ("cuda", "1b", "bfloat16", True)),
        (machine(RTX_3070), [], ("cuda", "1b", "bfloat16", True)),
        (machine(SMALL), ["--model", "tiny"], ("cuda", "tiny", "bfloat16", True)),
        (machine(T4), [], ("cuda", "1b", "float32", True)),
        (machine(H100, H200), ["--device", "cuda:1"], ("cuda:1", "8b", "bfloat16", True)),
        (machine(H100), ["--model", "tiny"], ("cuda", "tiny", "bfloat16", True)),
        (machine(H100), ["--batch-invariant"], ("cuda", "8b", "bfloat16", False)),
        (machine(H100), ["--no-compile"], ("cuda", "8b", "bfloat16", False)),
        (machine(H100), ["--device", "cpu"], ("cpu", "tiny", "float32", False)),
        (machine(H100), ["--runner", "simulated"], ("cpu", "tiny", "float32", False)),
        (machine(H100), ["--connect", "[::1]:7000"], ("cpu", "tiny", "float32", False)),
        (machine(H100, torch=CPU_BUILD), [], ("cpu", "tiny", "float32", False)),
        (machine(), [], ("cpu", "tiny", "float32", False)),
        (machine(init=100), [], ("cpu", "tiny", "float32", False)),
    ],
)
def test_the_device_decides_on_what_is_not_given(
    on: Machine, flags: list[str], expected: tuple[object, ...]
) -> None:
    config, said = chosen(on, *flags)
    assert (config.device, config.model, config.dtype, config.compile) == expected
    assert bool(said) == config.device.startswith("cuda"), "a CPU goes without saying"


@pytest.mark.parametrize(
    ("on", "flags", "num_blocks"),
    [
        # (0.9 x 150.1 GB - 16.06 GB - some 1.2 GB) / 2 MiB
        (machine(H200), [], range(55_800, 56_200)),
        (machine(H100), [], range(28_000, 28_400)),
        (machine(RTX_3090), [], range(2_250, 2_650)),
        (machine(H100), ["--workers", "2"], range(9_900, 10_100)),
        (machine(H100), ["--gpu-memory-utilization", "0.5"], range(11_800, 12_200)),
        (machine(H100), ["--kv-cache-memory", "8GiB"], range(4096, 4097)),
        (machine(H100), ["--model", "tiny"], range(MOST_BLOCKS, MOST_BLOCKS + 1)),
        (machine(), ["--kv-cache-memory", "1GiB"], range(16_384, 16_385)),
    ],
)
def test_as_many_blocks_as_fit(on: Machine, flags: list[str], num_blocks: range) -> None:
    assert chosen(on, *flags)[0].num_blocks in num_blocks


@pytest.mark.parametrize(
    ("on", "flags", "why"),
    [
        (machine(), ["--device", "cuda"], "there is no NVIDIA driver here, .*: install it"),
        (machine(H100, version=12020), ["--device", "cuda"], r"CUDA 12\.2 at most, .* 13\.0: upd"),
        (machine(H100, torch=CPU_BUILD), ["--device", "cuda"], "built without CUDA: install"),
        (machine(H100, torch=None), ["--device", "cuda"], "torch is not installed: pip install"),
        (machine(H100, has_triton=False), ["--device", "cuda"], "needs Triton: pip install triton"),
        (machine(H100, missing_tools=NO_COMPILER), ["--device", "cuda"], "lacks a C compiler "),
        (machine(init=100), ["--device", "cuda"], "shows no device: look at CUDA_VISIBLE_DEVICES"),
        (machine(H100, init=802), ["--device", "cuda"], "cuInit: error 802.*nvidia-smi"),
        (machine(H100, H100), ["--device", "cuda:7"], "the driver shows cuda:0 to cuda:1: name"),
        (machine(H100), ["--device", "gpu"], "must be auto, cpu, cuda or cuda:N, not 'gpu'"),
        (
            machine(RTX_3070),
            ["--model", "8b"],
            r"16\.1 GB of weights, .* do not fit into the 7\.6 GB of cuda:0 \(NVIDIA GeForce RTX "
            r"3070, 8\.4 GB\) that --gpu-memory-utilization 0\.9 gives it: take --model 1b or tiny",
        ),
        (
            machine(SMALL),
            [],
            r"^neither 8b nor 1b fits: --model 1b in bfloat16 with 256 blocks: 2\.5 GB of weights, "
            r"0\.6 GB of CUDA context, .* in all 3\.8 GB, do not fit into the 1\.8 GB of cuda:0 "
            r"\(NVIDIA T400, 2\.0 GB\) that .* gives it: take --model tiny$",
        ),
        (
            machine(RTX_3090),
            ["--num-blocks", "60000"],
            r"neither 8b nor 1b .*: lower --num-blocks, or take --model tiny$",
        ),
        (
            machine(RTX_3090),
            ["--model", "8b", "--num-blocks", "4096"],
            r"8\.6 GB of KV cache.*do not fit .*: lower --num-blocks$",
        ),
        (machine(RTX_3090), ["--model", "8b", "--max-model-len", "65536"], "lower --max-model-len"),
        (
            machine(H100),
            ["--model", "8b", "--workers", "5"],
            r"15\.3 GB .* each of 5 workers: take",
        ),
        (machine(T4), ["--dtype", "bfloat16"], "Tesla T4 has compute capability 7.5.*float32"),
        (machine(H100), ["--kv-cache-memory", "50MB"], "holds 23 blocks, .* 256: give 537MB"),
        (machine(H100), ["--kv-cache-memory", "8GB", "--num-blocks", "9"], "give one of them"),
        (machine(), ["--kv-cache-memory", "8GB", "--runner", "simulated"], "give --num-blocks"),
        (machine(H100), ["--block-size", "0"], "block_size must be at least 1"),
        (machine(H100), ["--max-model-len", "0"], "max_model_len must be at least 1, not 0"),
        (machine(H100), ["--num-blocks", "0"], "num_blocks must be at least 1"),
        (machine(H100), ["--model", "/nowhere"], "neither a folder nor one of 1b, 8b, tiny"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    on: Machine, flags: list[str], why: str
) -> None:
    with pytest.raises(EngineConfigError, match=why) as refused:
        chosen(on, *flags)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("on", "why"),
    [
        (machine(H100, version=12020), "for CUDA 12.2 at most, and torch 2.13.0+cu130 for CUDA"),
        (machine(H100, has_triton=False), "needs Triton: pip install triton"),
        (machine(H100, missing_tools=NO_COMPILER), "lacks a C compiler (install gcc or clang)"),
        (machine(H100, init=999), "cuInit: error 999"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_left_alone_which_is_said(on: Machine, why: str) -> None:
    config, said = chosen(on)
    assert config == EngineConfig(device="cpu")
    assert said.startswith("cpu: tiny in float32, 4,096 blocks of KV cache; not CUDA, because ")
    assert why in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("compiler", "commands", "has_headers", "missing"),
    [
        (None, {"gcc"}, True, []),
        (None, {"clang"}, True, []),
        ("cc-13", {"cc-13"}, True, []),
        (None, {"cc"}, True, ["a C compiler (install gcc or clang)"]),
        (
            "cc-13",
            {"gcc"},
            True,
            ["the C compiler 'cc-13' that CC names (install it, or unset CC)"],
        ),
        (None, {"gcc"}, False, ["HERE/Python.h (install python3-dev)"]),
    ],
)
def test_what_triton_compiles_its_launchers_with_is_looked_for(
    compiler: str | None, commands: set[str], has_headers: bool, missing: list[str], tmp_path: Path
) -> None:
    if has_headers:
        (tmp_path / "Python.h").touch()
    found = missing_tools(compiler, {name: name for name in commands}.get, tmp_path)
    assert [text.replace(str(tmp_path), "HERE") for text in found] == missing


@pytest.mark.parametrize("text", ["8G B", "-1", "0", "8XB", "many"])
def test_a_size_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        chosen(machine(H100), f"--kv-cache-memory={text}")
    assert "a size is a number of bytes such as 8GB, not" in capsys.readouterr().err


def test_a_check_says_what_would_be_served_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    for on, expected in (
        (machine(H100), "cuda:0 (NVIDIA H100 80GB HBM3, 85.0 GB): 8b in bfloat16, 4,096 blocks"),
        (machine(), "cpu: tiny in float32, 4,096 blocks of KV cache; not CUDA, because there is"),
    ):
        with pytest.raises(SystemExit) as ended:
            chosen(on, "--check", "--num-blocks", "4096")
        assert ended.value.code is None
        assert capsys.readouterr().out.startswith(expected)


def test_the_version_of_torch_is_read_without_importing_it() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    assert read_torch_version() == (str(torch.__version__), torch.version.cuda)


def test_a_checkpoint_takes_the_context_that_its_cache_holds(tmp_path: Path) -> None:
    sizes = '"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, '
    sizes += '"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, '
    config = f'{{"architectures": ["LlamaForCausalLM"], {sizes} "max_position_embeddings": 131072}}'
    (tmp_path / "config.json").write_text(config)
    whole, _ = chosen(machine(H100), "--model", str(tmp_path))
    assert whole.max_model_len == 131_072
    part, _ = chosen(machine(RTX_3070), "--model", str(tmp_path))
    assert part.max_model_len == 16 * part.num_blocks < 131_072
