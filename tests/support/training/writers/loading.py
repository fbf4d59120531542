"""Checkpoints as their frameworks load them: says the state of each folder that it is given."""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed.checkpoint as dcp
from peft import PeftModel
from transformers import GPT2LMHeadModel

from tests.support.training.writers import distributed, trainer
from tests.support.training.writers.reporting import report
from tests.support.training.writers.states import digest_of, model


def sharded(folder: Path) -> str:
    return digest_of(GPT2LMHeadModel.from_pretrained(folder).state_dict())


def resumed(folder: Path) -> str:
    """What the trainer begins with; then it goes on for a step, with the optimizer, the schedule and the random numbers of the checkpoint."""
    step = int(folder.name.rpartition("-")[2])
    with TemporaryDirectory() as out:
        training = trainer.trainer(Path(out), step + 1)
        training.train(resume_from_checkpoint=str(folder))
        assert training.state.global_step == step + 1
    return sharded(folder)


def together(folder: Path) -> str:
    """In one process what four wrote."""
    state = {name: tensor.zero_() for name, tensor in distributed.state(0).items()}
    dcp.load(state, checkpoint_id=folder)
    return digest_of(state)


def adapter(folder: Path) -> str:
    return digest_of(PeftModel.from_pretrained(model(7), folder).state_dict())


WAYS: dict[str, Callable[[Path], str]] = {
    "sharded": sharded,
    "trainer": resumed,
    "distributed": together,
    "adapter": adapter,
}

if __name__ == "__main__":
    _, way, *folders = sys.argv
    for one in folders:
        report(folder=one, state=WAYS[way](Path(one)))
