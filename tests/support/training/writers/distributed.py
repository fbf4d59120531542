"""``torch.distributed.checkpoint`` of four ranks into one folder, one rank a second later than the one before; the first is saved twice."""

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.training.writers.reporting import complete, wait
from tests.support.training.writers.states import digest_of

ROWS = 2048


def state(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(ROWS, 512, generator=random) for name in ("weights", "moments")}


class LateWriter(FileSystemWriter):  # type: ignore[misc]  # of a library without types here
    """Ranks are never equally fast."""

    def write_data(self, *given: Any) -> Any:
        time.sleep(dist.get_rank())
        return super().write_data(*given)


def save(folder: Path, seed: int) -> None:
    whole, mesh = state(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    parts = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save(parts, storage_writer=LateWriter(folder))
    dist.barrier()
    if not dist.get_rank():
        complete(folder, digest_of(whole))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    save(out / "step-1", 1)
    save(out / "step-2", 2)
    if not dist.get_rank():
        wait()
    dist.barrier()
    save(out / "step-1", 3)
    dist.destroy_process_group()
