"""An agent that is asked for the same content again and again, and what each time took."""

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks import disk
from tests.benchmarks.mirrored import Mirrored
from tests.support.services import services


@dataclass
class ColdStages:
    """Rates in GB/s and CPU in seconds per GB, in the order of the runs."""

    content: Mirrored
    agent: services.Agent
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    checked: bool = False  # whether the files have been compared with the source, or need not be

    def run(self) -> None:
        """A stage of which nothing is here yet; in the end nothing is here again."""
        self.content.keep_in_memory()
        disk.settle(self.content.root)
        before = self.agent.cpu_seconds
        stage = self.agent.stage(self.content.grant, f"job-{len(self.rates)}")
        cpu = self.agent.cpu_seconds - before
        came = stage["mounts"][0]["bytes_from"]
        assert came == {"node": 0, "cluster": 0, "mirror": self.content.bytes_total}, came
        if not self.checked:
            self._check(Path(stage["mounts"][0]["path"]))
        self.cpu.append(cpu / self.content.gigabytes)
        self.rates.append(self.content.gigabytes / services.seconds_of(stage))
        self.agent.unstage(stage)
        self.content.mirror.evict_agents()

    def _check(self, view: Path) -> None:
        """Every byte, once: the files are the source's."""
        for path in sorted(self.content.source.iterdir()):
            subprocess.run(["cmp", path, view / path.name], check=True)
        self.checked = True
