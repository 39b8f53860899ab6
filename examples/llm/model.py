"""A small Llama with random weights, its tokenizer, and its KV cache in blocks.

Every process makes the same ones: the weights by a seed, the tokenizer by training it on TEXT.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from aioflagcx.kv import CacheGroup

TEXT = """
A prefill server reads the whole prompt at once and computes keys and values for every token of it.
A decode server then writes the answer, one token after the other, and looks at all keys and values
each time. They are different kinds of work, so they are given to different machines; and between
them somebody has to carry the cache, which is larger than the prompt by four orders of magnitude.
The quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly.
"""

PROMPTS = [line for line in TEXT.splitlines() if line]

BLOCK_TOKENS = 16
LAYERS, HEADS, KV_HEADS, WIDTH = 4, 8, 4, 16
VOCABULARY = 400


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE, which knows every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(PROMPTS, trainer)
    return tokenizer


class Model:
    """Greedy decoding, so that equal caches give equal tokens."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)  # the processes of the example share the cores
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HEADS * WIDTH,
            intermediate_size=4 * HEADS * WIDTH,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            initializer_range=0.2,  # else the answers hardly depend on the cache
            bos_token_id=None,
            eos_token_id=None,
        )
        self._model = LlamaForCausalLM(config).eval()

    def step(self, tokens: Sequence[int], cache: DynamicCache) -> int:
        """The token that follows, with the tokens' keys and values added to the cache."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([tokens]), cache=cache)
        return int(output.logits[0, -1].argmax())

    def generate(self, first: int, cache: DynamicCache, count: int) -> Iterator[int]:
        """``count`` tokens in all, the first of which is known."""
        token = first
        for position in range(count):
            if position:
                token = self.step([token], cache)
            yield token

    def new_cache(self) -> DynamicCache:
        """An empty one."""
        return DynamicCache()

    def alone(self, prompt: Sequence[int], count: int) -> list[int]:
        """What one process by itself answers."""
        cache = self.new_cache()
        return list(self.generate(self.step(prompt, cache), cache, count))


class PagedCache:
    """Blocks of BLOCK_TOKENS tokens, for each layer's keys and values."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._pool = torch.zeros(LAYERS, 2, blocks, BLOCK_TOKENS, KV_HEADS, WIDTH)

    @property
    def group(self) -> CacheGroup:
        """For a KVManager."""
        block = self._pool[0, 0, 0]
        return CacheGroup(
            [(layer[0].data_ptr(), layer[1].data_ptr()) for layer in self._pool],
            self.blocks,
            block.numel() * block.element_size(),
            heads=KV_HEADS,
            repeats=BLOCK_TOKENS,
        )

    def store(self, table: Sequence[int], cache: DynamicCache) -> None:
        """Put a request's keys and values into the blocks of ``table``, the last padded."""
        for pool, layer in zip(self._pool, cache.layers, strict=True):
            for plane, values in zip(pool, (layer.keys, layer.values), strict=True):
                padded = torch.zeros(len(table) * BLOCK_TOKENS, KV_HEADS, WIDTH)
                padded[: values.shape[2]] = values[0].transpose(0, 1)
                plane[list(table)] = padded.view(-1, BLOCK_TOKENS, KV_HEADS, WIDTH)

    def load(self, table: Sequence[int], tokens: int) -> DynamicCache:
        """A copy of a request's keys and values."""
        cache = DynamicCache()
        for number, pool in enumerate(self._pool):
            keys, values = (
                plane[list(table)].view(-1, KV_HEADS, WIDTH)[:tokens].transpose(0, 1)[None]
                for plane in pool
            )
            cache.update(keys.contiguous(), values.contiguous(), number)
        return cache

    def corrupt(self, block: int) -> None:
        """Do to a block what a hand-over must never do."""
        self._pool[:, :, block] = torch.randn(self._pool[:, :, block].shape)


def blocks_for(tokens: int) -> int:
    """How many blocks so many tokens take."""
    return -(-tokens // BLOCK_TOKENS)
