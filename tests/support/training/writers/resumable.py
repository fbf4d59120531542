"""One rank of a training that can be killed and resumed: it reports the loss of each step, and writes each checkpoint aside, then renames it.

A checkpoint holds all that the next step depends on: weights, optimizer, random numbers, and the place in the data.
"""

import json
import signal
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.training.writers.reporting import report, wait

SAMPLES, FEATURES, WIDTH, BATCH = 512, 64, 1536, 16


@dataclass
class Rank:
    """What a step changes. ``step`` is the last one done."""

    model: Any
    optimizer: Any
    epoch: int = 0
    position: int = 0
    step: int = 0

    def train(self, samples: torch.Tensor, targets: torch.Tensor, parallel: Any) -> float:
        """One step; the loss of this rank's share of the batch."""
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        start = self.position + dist.get_rank() * BATCH
        chosen = order[start : start + BATCH]
        loss = nn.functional.mse_loss(parallel(samples[chosen]), targets[chosen])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        self.position += dist.get_world_size() * BATCH
        if self.position >= SAMPLES:
            self.epoch, self.position = self.epoch + 1, 0
        return float(loss.item())

    def save(self, folder: Path, *, is_hanging: bool) -> None:
        """With ``is_hanging`` it never ends."""
        aside = folder.with_name(f"tmp-{folder.name}")
        aside.mkdir()
        save_file(self.model.state_dict(), aside / "model.safetensors")
        if is_hanging:
            report(hanging=self.step)
            signal.pause()
        torch.save(self.optimizer.state_dict(), aside / "optimizer.pt")
        torch.save(torch.get_rng_state(), aside / "random.pt")
        place = {"epoch": self.epoch, "position": self.position, "step": self.step}
        (aside / "place.json").write_text(json.dumps(place))
        aside.rename(folder)

    def load(self, folder: Path) -> None:
        self.model.load_state_dict(load_file(folder / "model.safetensors"))
        self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
        torch.set_rng_state(torch.load(folder / "random.pt"))
        place = json.loads((folder / "place.json").read_text())
        self.epoch, self.position, self.step = place["epoch"], place["position"], place["step"]


def main(asked: Namespace) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{asked.store}", rank=asked.rank, world_size=asked.ranks
    )  # a file: no port that somebody else may take
    torch.manual_seed(0)
    samples, targets = torch.randn(SAMPLES, FEATURES), torch.randn(SAMPLES, 1)
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )
    rank = Rank(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.manual_seed(1 + asked.rank)  # each rank drops others
    if asked.resume is not None:
        rank.load(asked.resume)
    parallel = DistributedDataParallel(model)
    while rank.step < asked.steps:
        loss = rank.train(samples, targets, parallel)
        report(step=rank.step, loss=loss)
        if asked.out is not None and not rank.step % asked.save_every:
            rank.save(asked.out / f"step-{rank.step}", is_hanging=rank.step == asked.hang_in)
            report(saved=rank.step)
            if asked.is_waiting:
                wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--hang-in", type=int)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--wait", dest="is_waiting", action="store_true")
    main(parser.parse_args())
