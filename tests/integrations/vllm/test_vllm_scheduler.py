"""The scheduler's half of the connector."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from aioflagcx.integrations.vllm.scheduler import (
    Load,
    Offer,
    Release,
    SchedulerHalf,
    Source,
    Step,
)

REMOTE = {
    "do_remote_prefill": True,
    "transfer_id": "t",
    "remote_host": "10.0.0.1",
    "remote_port": 14600,
    "remote_tp_size": 2,
}
SOURCE = Source("t", "10.0.0.1", 14600, 2)


def request(
    params: dict[str, Any] | None, status: str = "FINISHED_LENGTH_CAPPED", tokens: int = 100
) -> Any:
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params and dict(params),
        num_prompt_tokens=tokens,
        status=SimpleNamespace(name=status),
    )


def half(**options: Any) -> SchedulerHalf:
    return SchedulerHalf("10.0.0.9", 14700, 4, **{"block_sizes": (32,), **options})


def test_a_prompt_that_prefill_has_is_loaded_between_steps() -> None:
    scheduler, wanted = half(), request(REMOTE)
    assert scheduler.matched_tokens(wanted, 32) == (68, True)
    assert scheduler.step() == Step()
    scheduler.allocated(wanted, [[5, 6, 7]], 68)
    step = scheduler.step()
    assert step == Step(loads=[Load("r", SOURCE, ((5, 6, 7),), 100)])
    assert pickle.loads(pickle.dumps(step)) == step
    assert scheduler.step() == Step()


def test_a_prompt_is_loaded_once() -> None:
    scheduler, wanted = half(), request(REMOTE)
    scheduler.allocated(wanted, [[5]], 68)
    scheduler.step()
    scheduler.allocated(wanted, [[5]], 0)
    assert scheduler.matched_tokens(wanted, 0) == (0, False)
    assert scheduler.step() == Step()


def test_a_prompt_that_is_here_already_is_released_at_prefill() -> None:
    scheduler, wanted = half(), request(REMOTE)
    assert scheduler.matched_tokens(wanted, 100) == (0, False)
    scheduler.allocated(wanted, [[5]], 0)
    assert scheduler.step() == Step(releases=[Release("r", SOURCE)])


def test_a_request_that_ends_before_it_has_blocks_is_released_at_prefill() -> None:
    scheduler = half()
    ended = request(REMOTE, "FINISHED_ABORTED")
    assert scheduler.finished(ended, [[]]) == (False, None)
    assert scheduler.finished(ended, [[]]) == (False, None)
    assert scheduler.step() == Step(releases=[Release("r", SOURCE)])


def test_a_request_that_ends_while_it_is_loaded_is_aborted() -> None:
    scheduler = half()
    ended = request(REMOTE, "FINISHED_ABORTED")
    scheduler.allocated(ended, [[5]], 100)
    scheduler.step()
    assert scheduler.finished(ended, [[5]]) == (False, None)
    assert scheduler.step() == Step(aborts=[("r", "vLLM ended it: FINISHED_ABORTED")])


def test_a_request_that_was_loaded_ends_like_any_other() -> None:
    scheduler, wanted = half(), request(REMOTE)
    scheduler.allocated(wanted, [[5]], 100)
    scheduler.step()
    scheduler.loaded(["r"])
    assert scheduler.finished(wanted, [[5]]) == (False, None)
    assert scheduler.step() == Step()


@pytest.mark.parametrize("status", ["FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"])
@pytest.mark.parametrize("transfer", [None, "t"])
def test_a_computed_request_is_offered_and_its_blocks_stay(
    status: str, transfer: str | None
) -> None:
    scheduler = half()
    params = {"do_remote_decode": True, "transfer_id": transfer}
    stay, answer = scheduler.finished(request(params, status), [[1, 2]])
    assert stay
    assert scheduler.step() == Step(offers=[Offer("r", transfer or "r", ((1, 2),), 100)])
    # What the answer says is what decode needs.
    other = half()
    other.allocated(request(answer), [[7]], 100)
    [load] = other.step().loads
    assert load.source == Source(transfer or "r", "10.0.0.9", 14700, 4)


def test_a_request_that_was_not_computed_is_dropped_and_its_blocks_are_free() -> None:
    scheduler = half()
    params = {"do_remote_decode": True, "transfer_id": "t"}
    assert scheduler.finished(request(params, "FINISHED_ABORTED"), [[1]]) == (False, None)
    assert scheduler.step() == Step(dropped=[("t", "prefill ended it: FINISHED_ABORTED")])


@pytest.mark.parametrize("params", [None, {}, {"other": 1}])
def test_requests_of_others_are_left_alone(params: dict[str, Any] | None) -> None:
    scheduler, plain = half(), request(params)
    assert scheduler.matched_tokens(plain, 0) == (0, False)
    scheduler.allocated(plain, [[1]], 0)
    assert scheduler.finished(plain, [[1]]) == (False, None)
    assert scheduler.step() == Step()


@pytest.mark.parametrize(
    "change",
    [
        {"transfer_id": ..., "remote_host": ..., "remote_port": ...},
        {"transfer_id": None},
        {"transfer_id": True},
        {"transfer_id": ""},
        {"transfer_id": "t" * 1025},
        {"transfer_id": "\ud800"},
        {"remote_host": None},
        {"remote_host": ""},
        {"remote_port": 70_000},
        {"remote_port": "x"},
        {"remote_port": float("inf")},
        {"remote_port": float("nan")},
        {"remote_port": -5, "remote_tp_size": 10},
        {"remote_port": -999_999_999, "remote_tp_size": 1_000_000_000},
        {"remote_tp_size": 0},
        {"remote_tp_size": 257},
    ],
)
def test_a_request_with_a_wrong_source_is_computed_here_and_the_log_says_so(
    change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    params = {key: value for key, value in {**REMOTE, **change}.items() if value is not ...}
    scheduler, wrong = half(), request(params)
    assert scheduler.matched_tokens(wrong, 0) == (0, False)
    scheduler.allocated(wrong, [[1]], 0)
    assert scheduler.finished(wrong, [[1]]) == (False, None)
    assert scheduler.step() == Step()
    [record] = caplog.records
    assert "request r" in record.getMessage()


def test_blocks_behind_the_prompt_are_not_offered() -> None:
    """There are some when more than one token was generated, or room was made for guesses."""
    scheduler = half(block_sizes=(32, 64))
    scheduler.finished(request({"do_remote_decode": True}, tokens=64), [[1, 2, 3], [4, 5]])
    assert scheduler.step().offers == [Offer("r", "r", ((1, 2), (4,)), 64)]


def test_what_no_decode_could_name_is_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = half()
    named = request({"do_remote_decode": True, "transfer_id": "t" * 1025})
    assert scheduler.finished(named, [[1]]) == (False, None)
    assert scheduler.step() == Step()
    assert "nobody can fetch its KV cache" in caplog.text


def test_of_a_sliding_window_only_the_last_blocks_are_handed_over() -> None:
    scheduler = half(block_sizes=(32, 32), windows=(0, 2))
    scheduler.allocated(request(REMOTE), [[1, 2, 3], [4, 5, 6]], 100)
    assert scheduler.step().loads[0].blocks == ((1, 2, 3), (5, 6))
    scheduler.loaded(["r"])
    scheduler.finished(request({"do_remote_decode": True}), [[1, 2, 3], [0, 8, 9]])
    assert scheduler.step().offers[0].blocks == ((1, 2, 3), (8, 9))
