"""States of models as values: small ones that a seed makes, and the digest by which two are compared."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def digest_of(state: Mapping[str, torch.Tensor]) -> str:
    """The same for two states with the same names and the same values to the last bit."""
    found = sha256()
    for name, tensor in sorted(state.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def model(seed: int, width: int = 64, words: int = 500) -> Any:
    """A GPT-2 of two layers with random weights."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=width, n_head=4, vocab_size=words, n_positions=64))
