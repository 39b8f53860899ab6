"""The toy model: its answers need every byte, in its place."""

from __future__ import annotations

import numpy as np
import pytest

from inference import model
from inference.model import PagedCache

PROMPT = [7, 31_999, 0, *range(100, 140)]


@pytest.mark.parametrize("where", [(0, 0, 0), (3, 16, 64), (-1, -1, -1)])
def test_one_wrong_bit_changes_the_answer_and_the_checksum(where: tuple[int, int, int]) -> None:
    kv = model.prefill(PROMPT)
    attended, checksum = model.attend(kv), model.digest(kv)
    kv[where] ^= np.uint64(1 << 20)
    assert model.next_token(model.attend(kv)) != model.next_token(attended)
    assert model.digest(kv) != checksum


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_is_in_anothers_place_changes_the_answer(axis: int) -> None:
    kv = model.prefill(PROMPT)
    moved = np.roll(kv, 1, axis)
    assert model.next_token(model.attend(moved)) != model.next_token(model.attend(kv))


def test_decode_goes_on_from_the_cache_alone_as_the_model_does() -> None:
    cache = PagedCache(8)
    table = np.array([5, 0, 7, 2, 3])
    cache.store(table, 0, model.prefill(PROMPT))
    steps = [cache.step(table, len(PROMPT) + i) for i in range(20)]
    tokens, checksum = model.answer(PROMPT, 20)
    assert steps == tokens
    assert model.digest(cache.load(table, len(PROMPT) + 20)) == checksum
    others = np.setdiff1d(np.arange(8), table)
    assert not cache.pool[:, others].any()


def test_an_answer_can_be_continued_by_another_server() -> None:
    tokens, checksum = model.answer(PROMPT, 12)
    assert model.answer(PROMPT + tokens[:5], 7) == (tokens[5:], checksum)
    assert model.answer(PROMPT + tokens, 0) == ([], checksum)


def test_different_prompts_have_different_answers() -> None:
    assert model.answer(PROMPT, 4) != model.answer(PROMPT[::-1], 4)


def test_addresses_are_those_of_the_pieces() -> None:
    cache = PagedCache(6)
    table = np.array([4, 1, 5])
    base = cache.pool.ctypes.data
    addresses = model.piece_addresses(base, cache.blocks, table).tolist()
    pieces = [cache.pool[plane, block] for plane in range(model.PLANES) for block in table]
    assert addresses == [piece.ctypes.data for piece in pieces]
    assert {piece.nbytes for piece in pieces} == {model.PIECE_BYTES}
