"""A small model as people publish it: weights, configuration and tokenizer, and other tensors saved by PyTorch."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.training.writers.states import model


def main() -> None:
    folder = Path(sys.argv[1])
    written = model(7)
    written.save_pretrained(folder)
    torch.save({name: tensor.clone() for name, tensor in written.state_dict().items()}, folder / "state.pt")
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


if __name__ == "__main__":
    main()
