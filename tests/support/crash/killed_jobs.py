"""Training jobs on a mirror and two agents, each killed again and again at random steps, and started again at once."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from bdn.wire.job_schema import LEAST_BYTES
from tests.support.agent.process import COMMAND, Daemon, Program
from tests.support.agent.runs import left_of_runs
from tests.support.crash.killing_cluster import NODES, Cluster
from tests.support.crash.killing_steps import Fuse
from tests.support.crash.mirror_scenario import repositories
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import Json, source
from tests.support.mirror.training_jobs import TERMINAL

LINES: Final = 60  # that each rank prints
HANGS_SECONDS: Final = 1200.0  # without the end of a job
LEFT_SECONDS: Final = 120.0  # from the end of the last job until nothing of it is left
_SLOTS: Final = 2  # jobs of a node
_AT_ONCE: Final = 3  # jobs: more ranks than slots, when one has two
_PAGE: Final = 50  # lines: a log takes several pages
_FROM, _TO = 1, 120  # steps that a life may have
_STATUSES: Final = ("CREATED", "PENDING", "DEPLOYING", "RUNNING")
_STARTED: Final = 'echo "$BT_TRAINING_JOB_ID $BT_NODE_RANK" >> "$BT_PROJECT_CACHE_DIR/starts"'
_PRINTS: Final = f'test -s /app/model/weights.bin && for i in $(seq {LINES}); do echo "line $i"; sleep 0.05; done'


@dataclass(frozen=True)
class Script:
    """What a job does last, and how it ends. ``whole`` are the ranks that print all their lines, whatever is killed."""

    last: str
    status: str = "COMPLETED"
    reason: str = ""  # its end
    nodes: int = 1
    whole: Sequence[int] = (0,)
    checkpoints: Sequence[str] = ()
    is_stopped: bool = False  # by its user, at a random moment


SCRIPTS: Final = (
    Script("true"),
    Script("sleep 86399 & exit 3", "FAILED", "ended with exit code 3 [COMMAND_FAILED]"),
    Script(
        'mkdir "$BT_CHECKPOINT_DIR/checkpoint-1" && echo 1 > "$BT_CHECKPOINT_DIR/checkpoint-1/state"',
        checkpoints=["checkpoint-1"],
    ),
    Script("true", nodes=2, whole=(0, 1)),
    Script("kill -9 $$", "FAILED", "(exit code 137), as happens when memory runs out [COMMAND_FAILED]"),
    Script(
        'test "$BT_NODE_RANK" = 0 || exit 4', "FAILED", "ended with exit code 4 [COMMAND_FAILED]", nodes=2, whole=(1,)
    ),
    Script("sleep 86399", "STOPPED", whole=(), is_stopped=True),
)


@dataclass
class TrainingCluster(Cluster):
    """``jobs`` are the ids of jobs and what they do. ``wrong`` are findings."""

    jobs: dict[str, Script] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _wanted: int = 0  # jobs
    _begun: int = 0

    def program(self, node: str, command: tuple[str, ...] = COMMAND) -> Program:
        given = {
            "BDN_AGENT_NODE": node,
            "BDN_AGENT_ROLES": "node,cluster,job",
            "BDN_AGENT_JOB_LAUNCHER": "bwrap",
            "BDN_AGENT_JOB_SLOTS": str(_SLOTS),
            "BDN_AGENT_EXPOSURE": "bind",
            "BDN_AGENT_VOLUME_ROOT": str(self.root / "volume"),
            "BDN_AGENT_CACHE_BYTES": str(4 * 1024**3),
            "BDN_AGENT_SCRATCH_BYTES": str(LEAST_BYTES),
            "BDN_AGENT_SETTLE_SECONDS": "0",
            "BDN_OUTAGE_SECONDS": "600",
        }
        return Program(self.root / node, f"http://127.0.0.1:{self.ports[0]}", given, command)

    # --- lives ---

    async def live(self, jobs: int) -> None:
        """Run jobs until there were so many and enough kills, and then until the nodes are empty."""
        self._wanted = jobs
        async with asyncio.TaskGroup() as group:
            group.create_task(self._lives("mirror", "bdn.cli.main", "serve", "--json"))
            for node in NODES:
                group.create_task(self._lives(node, "node_agent.__main__"))
            await self._run()
            self.over.set()

    async def _lives(self, name: str, module: str, *arguments: str) -> None:
        fuse = Fuse.at(self.root / f"{name}.fuse")
        while not self.over.is_set():
            fuse.spare()
            is_early = name != "mirror" and self._is_due and self.random.random() < 0.3  # it may die while it starts
            if is_early:
                self._light(fuse)
            try:
                async with self._running(name, fuse.command(module, *arguments)) as running:
                    while not (is_early or self._is_due or self.kills.enough.is_set()):  # noqa: ASYNC110 - other processes
                        await asyncio.sleep(0.1)
                    if self._is_due and not is_early:
                        self._light(fuse)
                    await self._until_dead_or_over(running.process, fuse)
            except AssertionError:
                if not is_early:
                    raise
                self.kills.count()

    @property
    def _is_due(self) -> bool:
        """Whether another kill is: they are spread over all jobs."""
        return self.kills.done < self.kills.wanted and self.kills.done * self._wanted < self.kills.wanted * self._begun

    def _light(self, fuse: Fuse) -> None:
        fuse.light(self.random.randint(_FROM, _TO), after=bool(self.random.getrandbits(1)))

    @asynccontextmanager
    async def _running(self, name: str, command: tuple[str, ...]) -> AsyncIterator[ServingProcess | Daemon]:
        async with self.mirror(command) if name == "mirror" else self.program(name, command).daemon() as running:
            yield running

    async def _until_dead_or_over(self, process: Any, fuse: Fuse) -> None:
        waits = [asyncio.create_task(one) for one in (process.wait(), self.kills.enough.wait(), self.over.wait())]
        ended, enough, over = waits
        await asyncio.wait([ended, enough], return_when=asyncio.FIRST_COMPLETED)
        fuse.spare()
        await asyncio.wait([ended, over], return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
            with suppress(asyncio.CancelledError):
                await one
        if process.returncode == -signal.SIGKILL:
            self.kills.count()

    # --- jobs ---

    async def _run(self) -> None:
        url = f"http://127.0.0.1:{self.ports[0]}"
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            ask = _Asking(http)
            project = (await ask("POST", "/v1/training_projects", {"training_project": {"name": "kills"}}))[
                "training_project"
            ]
            place = f"/v1/training_projects/{project['id']}/jobs"
            await self._until(lambda: _has_nodes(ask), lambda: "the mirror does not know the agents")

            async def work() -> None:
                while self._begun < self._wanted or not self.kills.enough.is_set():
                    self._begun += 1
                    await self._job(ask, place, f"job {self._begun}", SCRIPTS[self._begun % len(SCRIPTS)])

            async with asyncio.TaskGroup() as group:
                for _ in range(_AT_ONCE):
                    group.create_task(work())
            self._check_starts()
            await self._until(self._is_empty, lambda: f"left over: {self._left_over()}", LEFT_SECONDS)

    async def _job(self, ask: "_Asking", place: str, name: str, script: Script) -> None:
        async def known() -> list[Json]:
            return [one for one in (await ask("GET", place))["training_jobs"] if one["name"] == name]

        while not (found := await known()):
            await ask.once("POST", place, {"training_job": _request(name, script)})
        job = found[0]["id"]
        self.jobs[job] = script
        newest: Json = found[0]
        stopped_in = self.random.choice(_STATUSES)

        async def is_over() -> bool:
            nonlocal newest
            newest = (await ask("GET", f"{place}/{job}"))["training_job"]
            status = _status(newest)
            if script.is_stopped and status in _STATUSES[_STATUSES.index(stopped_in) :]:
                await ask.once("POST", f"{place}/{job}/stop", {})
            return status in TERMINAL

        await self._until(is_over, lambda: f"{name} does not end: {newest}")
        status, reason = _status(newest), newest["error_message"] or ""
        log = await _log(ask, f"{place}/{job}")
        if status != script.status or not reason.endswith(script.reason):
            self.wrong.append(f"{name} {job} is {status}: {reason}; its log: {log}")
        for rank in range(script.nodes):
            lines = [text for replica, text in log if replica == f"r{rank}" and text.startswith("line ")]
            count = LINES if rank in script.whole else len(lines)
            if lines != [f"line {number}" for number in range(1, count + 1)]:
                self.wrong.append(f"{name} {job}: rank {rank} printed {lines}")
        listed = [one["checkpoint_id"] for one in (await ask("GET", f"{place}/{job}/checkpoints"))["checkpoints"]]
        if listed != list(script.checkpoints):
            self.wrong.append(f"{name} {job}: its checkpoints are {listed}")

    def _check_starts(self) -> None:
        """No rank has started twice."""
        (path,) = (self.root / "volume").rglob("starts")
        found = Counter(path.read_text().splitlines())
        wanted = {f"{job} {rank}" for job, script in self.jobs.items() for rank in script.whole}
        if found.most_common(1)[0][1] > 1 or not found.keys() >= wanted:
            self.wrong.append(f"starts: {found}, wanted once: {wanted}")

    # --- what is left ---

    async def _is_empty(self) -> bool:
        return not await asyncio.to_thread(self._left_over)

    def _left_over(self) -> list[str]:
        left = [one for node in NODES for one in left_of_runs(self.root / node)]
        return [*left, *_loop_devices(self.root), *_contained(self.root)]

    async def _until(
        self, condition: Callable[[], Awaitable[bool]], what: Callable[[], str], seconds: float = HANGS_SECONDS
    ) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not await condition():  # noqa: ASYNC110 - other processes
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"{what()}, after {self.kills.done} kills") from None


@dataclass(frozen=True)
class _Asking:
    """Asks a mirror that may die."""

    http: httpx2.AsyncClient

    async def __call__(self, method: str, path: str, body: Json | None = None) -> Json:
        """The answer, asked for until there is one."""
        while (answer := await self.once(method, path, body)) is None:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.1)
        return answer

    async def once(self, method: str, path: str, body: Json | None = None) -> Json | None:
        """None: the mirror died, or has just started."""
        try:
            answer = await self.http.request(method, path, json=body)
        except httpx2.TransportError:
            return None
        assert answer.status_code in (200, 503), answer.text
        return dict(answer.json()) if answer.status_code == 200 else None


def _status(job: Json) -> str:
    return str(job["current_status"]).removeprefix("TRAINING_JOB_")


async def _has_nodes(ask: _Asking) -> bool:
    """Before, the mirror refuses jobs that no cluster could ever run."""
    return {one["node"] for one in (await ask("GET", "/agents"))["items"]} == set(NODES)


def _request(name: str, script: Script) -> Json:
    runtime = {
        "start_commands": [_STARTED, _PRINTS, script.last],
        "cache_config": {"enabled": True},
        "checkpointing_config": {"enabled": True, "volume_size_gib": 1} if script.checkpoints else None,
    }
    weights = [source(f"hf://{next(iter(repositories()))}", "/app/model")]
    compute = {"node_count": script.nodes, "cpu_count": 1, "memory": "1Gi"}
    return {"name": name, "compute": compute, "runtime": runtime, "weights": weights}


async def _log(ask: _Asking, job: str) -> list[tuple[str | None, str]]:
    """Replica and text of all lines, read as ``truss train logs`` reads them."""
    found: list[tuple[str | None, str]] = []
    start = 0
    while page := (await ask("POST", f"{job}/logs", {"direction": "asc", "limit": _PAGE, "start_epoch_millis": start}))[
        "logs"
    ]:
        found += [(line["replica"], line["message"]) for line in page]
        start = int(page[-1]["timestamp"]) // 10**6 + 1
    return found


def _loop_devices(root: Path) -> list[str]:
    """Of images below ``root``."""
    found = []
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if path.read_text().startswith(str(root)):
                found.append(str(path))
    return found


def _contained(root: Path) -> list[str]:
    """Processes in a mount namespace of their own that see something below ``root``."""
    own, found = Path("/proc/self/ns/mnt").readlink(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_its = f"/{root.name}/" in (process / "mountinfo").read_text()
            if (process / "ns/mnt").readlink() != own and is_its:
                found.append(f"{process.name} {(process / 'cmdline').read_bytes()!r}")
    return found
