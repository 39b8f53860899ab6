"""A Llama of 5 MB with random weights and a tokenizer of bytes, in the format of Hugging Face.

Runs in vLLM's environment: python make_model.py FOLDER
"""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LONGEST = 2048
"""Tokens of a prompt and its answer."""


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=LONGEST)


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,  # else the answers hardly depend on the cache
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    folder = sys.argv[1]
    tokenizer().save_pretrained(folder)
    model().save_pretrained(folder)


if __name__ == "__main__":
    main()
