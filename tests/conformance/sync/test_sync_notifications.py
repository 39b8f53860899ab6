"""Threads that wait for notifications."""

from __future__ import annotations

import time

import pytest
from conformance.sync.threads_pair import InThread, Pair, until

from aioflagcx.errors import EngineClosed


def test_in_the_order_they_came(pair: Pair) -> None:
    for index in range(100):
        pair.session.notify(str(index), bytes([index]))
    notes = pair.theirs.notifications()
    assert [next(notes).name for _ in range(100)] == [str(index) for index in range(100)]


def test_get_waits_and_gives_up(pair: Pair) -> None:
    notes = pair.theirs.notifications()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        notes.get(timeout=0.05)
    assert 0.05 <= time.monotonic() - started < 5
    waiting = InThread(notes.get)
    pair.session.notify("name", b"payload")
    note = waiting.result()
    assert (note.name, note.payload, note.engine_id) == ("name", b"payload", pair.ours.engine_id)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="0 seconds or more"):
            notes.get(bad)


def test_get_with_no_time_takes_what_is_there(pair: Pair) -> None:
    notes = pair.theirs.notifications()
    for index in range(50):
        with pytest.raises(TimeoutError):
            notes.get(0)
        pair.session.notify(str(index), b"")
        assert notes.get(0).name == str(index)


def test_each_goes_to_one_of_the_threads(pair: Pair) -> None:
    """Also while threads give up all the time, just when something may have come."""
    count = 400
    shared = pair.theirs.notifications()

    def consume(index: int) -> list[str]:
        notes = shared if index % 2 else pair.theirs.notifications()
        taken = []
        while True:
            try:
                taken.append(notes.get(0.001 * (index % 3) or None).name)
            except TimeoutError:
                continue
            except EngineClosed:
                return taken

    consumers = [InThread(consume, index) for index in range(8)]
    for index in range(count):
        pair.session.notify(str(index), b"")
    until(lambda: not pair.theirs.stats().notifications_queued)
    pair.theirs.close()
    taken = [name for consumer in consumers for name in consumer.result()]
    assert sorted(map(int, taken)) == list(range(count))


def test_what_is_queued_can_be_taken_after_the_end(pair: Pair) -> None:
    notes = pair.theirs.notifications()
    for index in range(5):
        pair.session.notify(str(index), b"")
    assert next(notes).name == "0"
    pair.theirs.close()
    assert [note.name for note in notes] == ["1", "2", "3", "4"]
    assert list(notes) == []
    assert list(pair.theirs.notifications()) == []  # as with the asyncio engine
    with pytest.raises(EngineClosed):
        notes.get()


def test_all_that_are_there_are_taken_at_once(pair: Pair) -> None:
    notes = pair.theirs.notifications()
    assert notes.get_all() == []
    for index in range(50):
        pair.session.notify(str(index), b"")
    assert [note.name for note in notes.get_all()] == [str(index) for index in range(50)]
    assert notes.get_all() == []
    pair.session.notify("last", b"")
    pair.theirs.close()
    assert [note.name for note in notes.get_all()] == ["last"]
    assert notes.get_all() == []
