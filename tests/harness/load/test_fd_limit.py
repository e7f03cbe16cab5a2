"""The limit of open files is raised as far as it may be, and what it cannot hold is refused."""

import resource

import pytest

from harness.errors import ConfigError
from harness.load.fd_limit import Limits, allow_streams


class System:
    """A system with these limits, and what it was told to set."""

    def __init__(self, soft: int, hard: int) -> None:
        self.limits: Limits = (soft, hard)

    def get(self, which: int) -> Limits:
        assert which == resource.RLIMIT_NOFILE
        return self.limits

    def put(self, which: int, limits: Limits) -> None:
        assert which == resource.RLIMIT_NOFILE
        self.limits = limits


@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [
        (1024, 20_000, 20_000),
        (20_000, 20_000, 20_000),
        (1024, resource.RLIM_INFINITY, 1 << 20),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, resource.RLIM_INFINITY),
    ],
)
def test_the_limit_is_raised_as_far_as_the_process_may(soft: int, hard: int, expected: int) -> None:
    system = System(soft, hard)
    allow_streams(5000, get=system.get, put=system.put)
    assert system.limits == (expected, hard)


def test_more_users_than_the_system_allows_are_refused_with_what_to_do() -> None:
    system = System(1024, 4096)
    with pytest.raises(
        ConfigError, match=r"5,000 streams at once need .* allows 4,096; .*ulimit -Hn"
    ):
        allow_streams(5000, get=system.get, put=system.put)
