"""A toy in place of a model, and the paged KV cache that it works on.

What it has in common with a real one: a token's keys and values follow from all tokens up to it,
and the next token follows from the keys and values of all tokens before. So whoever is given a
cache, and never the prompt, can go on only if every word of the cache is right and in its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

LAYERS = 4
PLANES = 2 * LAYERS  # keys and values of each layer
BLOCK_TOKENS = 16
WIDTH = 128  # 64-bit words of one token's key or value in one layer
VOCABULARY = 32_000

TOKEN_BYTES = WIDTH * 8
PIECE_BYTES = BLOCK_TOKENS * TOKEN_BYTES
"""Bytes of a block in one plane: what is contiguous in a paged cache."""

Words = npt.NDArray[np.uint64]
"""Keys and values, [plane, token, word]; or, in a pool, [plane, block, token, word]."""

Integers = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1


def _mix(number: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): any bit changes half of the others."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def _numbers(count: int, seed: int) -> Words:
    return np.random.Generator(np.random.Philox(seed)).integers(
        0, 1 << 64, count, dtype=np.uint64
    ) | np.uint64(1)


_PLACES = _numbers(PLANES * WIDTH, 1).reshape(PLANES, 1, WIDTH)
_PLANE_WEIGHTS = _numbers(PLANES, 2)[:, None]
_WORD_WEIGHTS = _numbers(WIDTH, 3)


def blocks_for(tokens: int) -> int:
    """How many blocks hold ``tokens`` tokens."""
    return -(-tokens // BLOCK_TOKENS)


def advance(state: int, token: int) -> int:
    """What is known after one more token; 0 before the first."""
    return _mix(state ^ _mix(token))


def keys_and_values(states: Sequence[int]) -> Words:
    """Of the tokens after which the states are ``states``, which the first words hold."""
    column = np.array(states, np.uint64)[None, :, None]
    words = (column ^ _PLACES) * np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(29)
    words[0, :, 0] = column[0, :, 0]
    return words


def prefill(tokens: Sequence[int]) -> Words:
    """The keys and values of all ``tokens``."""
    states = []
    state = 0
    for token in tokens:
        state = advance(state, token)
        states.append(state)
    return keys_and_values(states)


def attend(kv: Words, first: int = 0) -> int:
    """A sum over every word of ``kv``, whose tokens begin at position ``first``.

    Modulo 2**64, so that the sum of parts is the sum of the whole.
    """
    positions = np.arange(first + 1, first + 1 + kv.shape[1], dtype=np.uint64)
    weights = _PLANE_WEIGHTS * (positions * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1))
    return int((np.einsum("ptw,w->pt", kv, _WORD_WEIGHTS) * weights).sum())


def next_token(attended: int) -> int:
    """The most likely token, given what :func:`attend` came to."""
    return _mix(attended) % VOCABULARY


def digest(kv: Words) -> str:
    """A checksum of keys and values."""
    return hashlib.blake2b(np.ascontiguousarray(kv).data, digest_size=16).hexdigest()


def answer(prompt: Sequence[int], count: int) -> tuple[list[int], str]:
    """The ``count`` tokens after ``prompt``, and the checksum of the cache at the end.

    Computed alone: without a paged cache, without servers.
    """
    kv = prefill(prompt)
    parts, tokens = [kv], []
    attended, state = attend(kv), int(kv[0, -1, 0])
    for position in range(len(prompt), len(prompt) + count):
        tokens.append(next_token(attended))
        state = advance(state, tokens[-1])
        parts.append(keys_and_values([state]))
        attended = (attended + attend(parts[-1], position)) & _MASK
    return tokens, digest(np.concatenate(parts, axis=1))


class PagedCache:
    """The keys and values of many requests, in blocks; a request has a table of its blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.pool: Words = np.zeros((PLANES, blocks, BLOCK_TOKENS, WIDTH), np.uint64)

    def store(self, table: Integers, first: int, kv: Words) -> None:
        """Put ``kv`` where the tokens from position ``first`` on belong."""
        positions = np.arange(first, first + kv.shape[1])
        self.pool[:, table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS] = kv

    def load(self, table: Integers, tokens: int) -> Words:
        """The keys and values of the first ``tokens`` tokens."""
        gathered = self.pool[:, table[: blocks_for(tokens)]]
        return gathered.reshape(PLANES, -1, WIDTH)[:, :tokens]

    def step(self, table: Integers, tokens: int) -> int:
        """Decode: the token after the first ``tokens``, whose keys and values are added."""
        kv = self.load(table, tokens)
        token = next_token(attend(kv))
        self.store(table, tokens, keys_and_values([advance(int(kv[0, -1, 0]), token)]))
        return token


def piece_addresses(base: int, blocks: int, table: Integers) -> Integers:
    """The address of each plane of each block of ``table``, in a pool of ``blocks`` at ``base``."""
    planes = np.arange(PLANES)[:, None] * blocks
    pieces: Integers = base + (planes + table) * PIECE_BYTES
    return pieces.ravel()
