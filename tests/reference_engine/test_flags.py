"""The command line: every setting has a flag, with the setting's own default."""

import msgspec
import pytest

from reference_engine.config import EngineConfig, EngineConfigError, FrontendSettings, RateLimits
from reference_engine.flags import build_parser, read_settings
from tests.reference_engine.fake_driver import machine

ON_CPU = machine()
UNCHUNKED = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")


def test_without_flags_all_is_as_the_settings_have_it() -> None:
    settings = read_settings([], {}, ON_CPU)
    assert settings.config == EngineConfig(device="cpu")
    assert settings.frontend == FrontendSettings()


@pytest.mark.parametrize("struct", [EngineConfig, FrontendSettings, RateLimits])
def test_every_setting_has_its_flag(struct: type[msgspec.Struct]) -> None:
    flags = {action.dest for action in build_parser()._actions}
    names = {field.name for field in msgspec.structs.fields(struct)}
    # Keys come from the environment; a limit and a cost have several flags each; the launcher of a
    # disaggregated engine gives each worker its component.
    assert names - flags <= {"api_keys", "rate_limits", "step_cost", "component"}


def test_flags_arrive_where_they_belong() -> None:
    settings = read_settings(
        [
            *("--heartbeat-s", "1.5", "--ack-timeout-s", "2", "--shutdown", "drain"),
            *("--requests-per-minute", "60", "--tokens-per-minute", "1000", "--rate-limit-kill"),
            *("--api-key-env", "KEYS", "--default-deadline-s", "30", "--num-blocks", "512"),
            *("--no-enable-prefix-caching", "--sim-fixed-ms", "5"),
        ],
        {"KEYS": "sk-a,sk-b"},
        ON_CPU,
    )
    frontend = settings.frontend
    assert (frontend.heartbeat_s, frontend.ack_timeout_s, frontend.shutdown) == (1.5, 2.0, "drain")
    limits = RateLimits(requests_per_minute=60, tokens_per_minute=1000, kills=True)
    assert frontend.rate_limits == limits
    assert (frontend.api_keys, frontend.default_deadline_s) == (("sk-a", "sk-b"), 30.0)
    assert (settings.config.num_blocks, settings.config.enable_prefix_caching) == (512, False)
    assert settings.config.step_cost.fixed_s == 0.005


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--heartbeat-s", "-1"], "heartbeat_s"),
        (["--ack-timeout-s", "0"], "ack_timeout_s"),
        (["--stall-timeout-s", "inf"], "stall_timeout_s"),
        (["--send-buffer-bytes", "1"], "send_buffer_bytes"),
        (["--keep-results", "-1"], "keep_results"),
        (["--default-deadline-s", "0"], "default_deadline_s"),
        (["--requests-per-minute", "0"], "requests_per_minute"),
        (["--api-key-env", "NOT_SET"], "NOT_SET holds no key"),
        (["--sim-fixed-ms", "inf"], "must be finite"),
        (["--runner", "simulated", "--device", "cuda"], "only the torch runner uses a device"),
        (["--runner", "none"], "give --kserve-port"),
        (["--runner", "handlers"], "give --handler-endpoint"),
        (["--handler-endpoint", "a.b.c", "--workers", "2"], "leave out --workers"),
        (["--port", "9", "--kserve-port", "9"], "--kserve-port 9: it takes 1, and 9 is one of"),
        (["--port", "8", "--kserve-port", "9", "--frontends", "2"], "9 is one of --port's"),
        (["--port", "65535", "--frontends", "2"], "--port 65535: it takes 2, and 65536 does not"),
        (["--connect", "10.0.0.1:7000"], "beyond loopback need a secret"),
        (["--worker-listen", "0.0.0.0:7000"], "beyond loopback need a secret"),
        (["--connect", "[::1]:7000", "--secret-env", "NOT_SET"], "NOT_SET is not set"),
        (["--connect", "localhost:7000", "--workers", "2"], "workers elsewhere: leave out"),
        (["--connect", "[::1]:7", "--worker-metrics-port", "0"], "leave out --worker-metrics"),
        (["--runner", "none", "--kserve-port", "0", "--disaggregated"], "has no workers"),
        (["--name", "west"], "--name goes with"),
        (["--worker-listen", "127.0.0.1:0", "--kserve-port", "0"], "without frontends"),
        (["--worker-listen", "127.0.0.1:0", "--frontends", "2"], "without frontends"),
        (["--peer-timeout-s", "0"], "peer_timeout_s must be from 0.1"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["--max-num-batched-tokens", "4"], "would starve"),
        (["--num-blocks", "8"], "must hold one request"),
        (["--model", "/nowhere"], "neither a folder nor one of 1b, 8b, tiny, smollm2"),
        (["--model", "smollm2", "--max-model-len", "9000"], "beyond the model's context"),
        (["--no-enable-chunked-prefill"], "without chunked prefill"),
        ([*UNCHUNKED, "--max-num-partial-prefills", "2"], "need chunked prefill"),
        (["--watermark", "1"], "watermark"),
        (["--watermark", "nan"], "watermark"),
        (["--force-reclaim-above", "1.5"], "force_reclaim_above"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(flags: list[str], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        read_settings(flags, {}, ON_CPU)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--api-key", "sk-secret"], "unrecognized arguments: --api-key"),
        (["--runner", "magic"], "invalid choice"),
        (["--port", "99999"], "from 0 to 65535"),
        (["--workers", "65"], "from 1 to 64"),
        (["--connect", "here"], "HOST:PORT"),
        (["--router", "direct"], "invalid choice"),
    ],
)
def test_bad_flags_and_values_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_settings(flags, {}, ON_CPU)
    assert message in capsys.readouterr().err
