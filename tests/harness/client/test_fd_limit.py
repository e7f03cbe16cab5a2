"""The limit of open files is raised as far as it may be, and what it cannot hold is refused."""

import resource

import pytest

from harness.client.fd_limit import allow_streams
from harness.errors import ConfigError


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
    limits = {resource.RLIMIT_NOFILE: (soft, hard)}
    allow_streams(5000, get=limits.__getitem__, put=limits.__setitem__)
    assert limits == {resource.RLIMIT_NOFILE: (expected, hard)}


def test_more_users_than_the_system_allows_are_refused_with_what_to_do() -> None:
    limits = {resource.RLIMIT_NOFILE: (1024, 4096)}
    with pytest.raises(
        ConfigError, match=r"5,000 streams at once need .* allows 4,096; .*ulimit -Hn"
    ):
        allow_streams(5000, get=limits.__getitem__, put=limits.__setitem__)
