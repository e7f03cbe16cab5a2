from reference_engine.frontend.journal import Ring


def test_pages_go_on_where_the_last_one_ended() -> None:
    ring: Ring[str] = Ring(10)
    for entry in "abcde":
        ring.append(entry)
    page = ring.after(0, limit=3)
    assert (page.entries, page.next_after, page.dropped) == (["a", "b", "c"], 3, 0)
    page = ring.after(page.next_after, limit=3)
    assert (page.entries, page.next_after) == (["d", "e"], 5)
    page = ring.after(page.next_after, limit=3)
    assert (page.entries, page.next_after, page.dropped) == ([], 5, 0)


def test_what_fell_out_is_said() -> None:
    ring: Ring[int] = Ring(3)
    for entry in range(1, 8):
        ring.append(entry)
    page = ring.after(1, limit=10)
    assert (page.first, page.entries, page.dropped) == (5, [5, 6, 7], 3)
    assert ring.after(5, limit=10).dropped == 0
