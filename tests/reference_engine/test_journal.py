from reference_engine.frontend.journal import LifecycleEntry, Page, Ring
from reference_engine.frontend.server import ndjson


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


def test_an_answer_says_where_to_go_on_and_what_is_lost() -> None:
    entry = LifecycleEntry(
        seq=5,
        t_ns=1,
        event="arrived",
        request_id="req-1",
        client_request_id=None,
        step=0,
        num_generated=0,
        num_blocks=0,
        reason=None,
    )
    answer = ndjson(Page([entry], first=5, next_after=5, dropped=3))
    names = ("x-walkaway-first", "x-walkaway-next-after", "x-walkaway-dropped")
    assert [answer.headers[name] for name in names] == ["5", "5", "3"]
    assert bytes(answer.body).startswith(b'{"seq":5,"t_ns":1,"event":"arrived"')
