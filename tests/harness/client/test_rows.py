"""Shards: what one process wrote another can read, while it is being written and after a crash."""

import platform
import resource
from pathlib import Path

import msgspec
import pytest

from harness.client.shards import ShardReader, ShardWriter, most_at_once
from harness.records import ClientSample, Outcome, RequestRow
from tests.harness.client.asking import limited
from tests.made_up.rows import request_row


def row(request_id: str) -> RequestRow:
    return request_row(request_id, sent_ns=1, ended_ns=2, outcome=Outcome.CUT_OFF)


def test_each_row_is_read_once_and_as_soon_as_it_was_written(tmp_path: Path) -> None:
    reader = ShardReader(tmp_path, RequestRow)
    assert reader.read_new() == []
    with (
        ShardWriter(tmp_path, RequestRow, 1) as one,
        ShardWriter(tmp_path, RequestRow, 2) as two,
        ShardWriter(tmp_path, ClientSample, 1),
    ):
        one.write(row("a"))
        assert reader.read_new() == [row("a")]
        two.write(row("b"))
        one.write(row("c"))
        assert [each.request_id for each in reader.read_new()] == ["c", "b"]
        assert reader.read_new() == []
    assert len(ShardReader(tmp_path, RequestRow).read_new()) == 3
    host = platform.node()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"client-{host}-1.ndjson",
        f"requests-{host}-1.ndjson",
        f"requests-{host}-2.ndjson",
    ]


def test_half_a_line_waits_for_its_other_half(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, RequestRow, 1) as writer:
        writer.write(row("a"))
    (path,) = tmp_path.iterdir()
    line = path.read_bytes()
    path.write_bytes(line + line[:50])
    reader = ShardReader(tmp_path, RequestRow)
    assert len(reader.read_new()) == 1
    assert reader.read_new() == []
    path.write_bytes(line + line)
    assert len(reader.read_new()) == 1


def test_a_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    """Torn in the middle, or inside a character."""
    with ShardWriter(tmp_path, RequestRow, 1) as writer:
        writer.write(msgspec.structs.replace(row("a"), error="é"), row("b"))
    (path,) = tmp_path.iterdir()
    with_accent, line = path.read_bytes().splitlines(keepends=True)
    torn = with_accent.split("é".encode())[0] + "é".encode()[:1]
    path.write_bytes(torn + b"\n" + line + line[:50] + line + line)
    reader = ShardReader(tmp_path, RequestRow)
    assert reader.read_new() == [row("b"), row("b")]
    assert reader.damaged == 2


def test_a_disk_that_was_full_in_the_middle_of_a_line_costs_no_row(tmp_path: Path) -> None:
    """As on a full disk, here by a limit on the size of files."""
    with ShardWriter(tmp_path, RequestRow, 1) as writer:
        writer.write(row("a"))
        (path,) = tmp_path.iterdir()
        with (
            limited(resource.RLIMIT_FSIZE, path.stat().st_size + 50),
            pytest.raises(OSError, match="No space left"),
        ):
            writer.write(row("b"))
        writer.write(row("c"))
    reader = ShardReader(tmp_path, RequestRow)
    assert reader.read_new() == [row("a"), row("b"), row("c")]
    assert reader.damaged == 0


def test_rows_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(number) for number in range(20)]
    with ShardWriter(tmp_path, RequestRow, 1) as writer:
        for name in names:
            writer.write(row(name))
    monkeypatch.setattr("harness.client.shards._READ_BYTES", 1000)
    parts = list(ShardReader(tmp_path, RequestRow).read_in_parts())
    assert len(parts) > 5
    assert [each.request_id for part in parts for each in part] == names


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ([], 0),
        ([(10, 20, 30)], 1),
        ([(10, 20, 30), (19, 29, 39)], 2),
        ([(10, 20, 30), (20, 30, 40)], 1),  # begun as the first was nearly done
        ([(10, 20, 30), (29, 39, 49)], 1),  # the last token may have been taken late
        ([(40, 50, 60), (10, 20, 30)], 1),  # one after the other
        ([(10, 20, 30), (11, 21, 31), (40, 50, 60)], 2),
        ([(0, 6, 7), (5, 9, 10), (5, 8, 9)], 3),
        ([(10, 20, 30), (12,), ()], 1),  # too short to judge
    ],
)
def test_how_many_streams_ran_at_once(times: list[tuple[int, ...]], most: int) -> None:
    assert most_at_once(times) == most
