import pytest

from reference_engine.faults import FaultError, Faults, parse_faults


def test_settings_become_faults() -> None:
    faults = parse_faults(["ignore-disconnect", "delay-abort=0.5", "lose-abort=0.02"])
    assert faults == Faults(ignore_disconnect=True, delay_abort=0.5, lose_abort=0.02)
    assert parse_faults(["leak-blocks=3"]).leak_blocks == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ignore-everything", "unknown fault 'ignore-everything'; there are: ignore-disconnect"),
        ("delay-abort=soon", "float"),
        ("delay-abort=-1", "from 0 to 3600"),
        ("delay-abort=inf", "from 0 to 3600"),
        ("lose-abort=2", "from 0 to 1"),
        ("leak-blocks=-1", "0 or more"),
        ("leak-blocks=1.5", "int"),
    ],
)
def test_what_cannot_be_is_refused(setting: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        parse_faults([setting])
