"""A mirror that runs training jobs on an agent: it gives out what a rank needs, commands it, and records its output."""

import io
import json
import os
import re
import signal
import tarfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import pytest

from bdn.core.errors import NotFoundError, UnauthenticatedError
from bdn.core.layout import Manifest
from bdn.core.training.states import RankState, Want, can_follow
from bdn.disk.binding import mounts_below
from bdn.settings import SettingsError
from bdn.wire.grants import Grant, GrantedMount
from bdn.wire.heartbeat_schema import Command, Heartbeat
from bdn.wire.run_schema import RunCommand, RunOutput, RunReport, RunSpec
from bdn.wire.shapes import document_of
from node_agent.run.launchers import answering_launcher
from tests.doubles.http_origin import Answer, Request
from tests.support.agent.mirror import AgentMirror
from tests.support.waiting import until

ARCHIVE = "/b10/archive"
SCRATCH_BYTES = 64 * 1024**2


@cache
def why_no_sandbox() -> str | None:
    try:
        answering_launcher("bwrap")
    except SettingsError as error:
        return str(error)
    return None


needs_bwrap = pytest.mark.skipif(why_no_sandbox() is not None, reason=f"bwrap cannot run here: {why_no_sandbox()}")


def tar_of(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@dataclass
class RunMirror(AgentMirror):
    """``specs`` are the ranks that it has placed; ``batches`` their output by number, as stored once."""

    specs: dict[tuple[str, int], RunSpec] = field(default_factory=dict)
    batches: defaultdict[str, dict[int, list[tuple[int, str]]]] = field(default_factory=lambda: defaultdict(dict))
    queries: list[str] = field(default_factory=list)  # of ``GET /runs``
    lacks_keys: bool = False  # it refuses the tokens of pods for now
    loses_answers: bool = False  # it stores output, and the agent does not learn of it
    behind: str | None = None  # the URL of a real mirror, which answers all that is not about runs

    def place(
        self,
        run: str,
        *commands: str,
        weights: Mapping[str, Manifest] | None = None,
        archive: bytes | None = None,
        **changes: Any,
    ) -> None:
        """Give a rank to the agent and command it to stage."""
        mounts = [GrantedMount(place, one.digest, "hf://org/model") for place, one in (weights or {}).items()]
        if archive is not None:
            packed = self.publish({"archive.tgz": archive})
            mounts.append(GrantedMount(ARCHIVE, packed.digest, "bt://project@job/.archive"))
        given = {
            "run": run,
            "rank": 0,
            "gpus": 0,
            "image": "python:3.11",
            "login": None,
            "cpus": None,
            "memory_bytes": None,
            "commands": list(commands),
            "environment": {"BT_NODE_RANK": "0"},
            "working_dir": "/b10/workspace",
            "archive": None if archive is None else ARCHIVE,
            "read_grant": self.signer.sign(Grant("org", tuple(mounts), time.time() + 3600)) if mounts else None,
            "scratch": "/mnt/bt-scratch",
            "checkpoints": None,
            "checkpoint_bytes": None,
            "push_grant": None,
            "caches": None,
            "cache_grant": None,
        }
        spec = RunSpec.model_validate(given | changes)
        self.specs[spec.run, spec.rank] = spec
        self.want(run, "stage", spec.rank)

    def want(self, run: str, want: Want, rank: int = 0) -> None:
        command = RunCommand(run=run, rank=rank, want=want)
        with self.lock:
            self.commands.append(Command(id=command.id, run=command))

    def report(self, run: str, want: Want | None = None) -> RunReport | None:
        """The newest report of this run. As for the mirror, one that arrives late changes nothing."""
        newest: RunReport | None = None
        for report in [report for beat in list(self.heartbeats) for report in beat.reports]:
            one = report.run
            if one is None or one.run != run or want not in (None, report.id.split(":")[3]):
                continue
            if newest is None or can_follow(newest.state, one.state):
                newest = one
        return newest

    async def reached(self, run: str, state: RankState, want: Want | None = None) -> RunReport:
        def is_there() -> bool:
            report = self.report(run, want)
            return report is not None and report.state in (state, "ENDED", "LOST")

        await until(is_there, f"{run} is never {state}")
        report = self.report(run, want)
        assert report is not None
        assert report.state == state, (report, self.lines(run))
        return report

    async def ran(self, run: str) -> RunReport:
        """Let a placed rank run to its end."""
        await self.reached(run, "STAGED")
        self.want(run, "go")
        return await self.reached(run, "ENDED", "go")

    def lines(self, run: str) -> list[str]:
        """All of its output, without the agent's own notes."""
        stored = [line for seq in sorted(self.batches[run]) for line in self.batches[run][seq]]
        assert [when for when, _ in stored] == sorted({when for when, _ in stored}), "times do not increase"
        return [text for _, text in stored if not text.startswith("bdn: ")]

    def _respond(self, request: Request) -> Answer:
        found = re.match(r"/runs/(\w+)/(\d+)(/logs)?(\?.*)?$", request.target)
        if found is None and self.behind is None and request.target.startswith("/pushes"):
            raise ConnectionAbortedError  # it takes no checkpoints
        if found is None:
            return super()._respond(request) if self.behind is None else self._forward(self.behind, request)
        if self.down:
            raise ConnectionAbortedError
        run, rank = found[1], int(found[2])
        if found[3] is None:
            self.queries.append(found[4])
            if self.lacks_keys:
                return Answer(401, content=json.dumps(document_of(UnauthenticatedError("an unknown key"))).encode())
        if (spec := self.specs.get((run, rank))) is None:
            return Answer(404, content=json.dumps(document_of(NotFoundError(f"run {run}"))).encode())
        if found[3] is None:
            return Answer(200, content=spec.model_dump_json().encode())
        output = RunOutput.model_validate_json(request.body)
        self.batches[run].setdefault(output.seq, output.lines)
        if self.loses_answers:
            raise ConnectionAbortedError
        return Answer(204)

    def _forward(self, url: str, request: Request) -> Answer:
        """As the real mirror answers; to a heartbeat at once, with the commands about runs."""
        body, heartbeat = request.body, None
        if request.target == "/agents/heartbeat":
            heartbeat = Heartbeat.model_validate_json(body)
            body = json.dumps(json.loads(body) | {"wait_seconds": 0, "reports": []}).encode()
        passed = ("authorization", "content-type", "bdn-agent-token")
        headers = {name: request.headers[name] for name in passed if name in request.headers}
        with httpx2.Client(trust_env=False, timeout=60) as client:
            try:
                answer = client.request(request.method, f"{url}{request.target}", content=body, headers=headers)
            except httpx2.TransportError as error:  # the real mirror is stopping, and the agent is gone or retries
                raise ConnectionAbortedError from error
        content = answer.content
        if heartbeat is not None:
            reply = json.loads(content)
            reply["pending"] += [one.model_dump(exclude_none=True) for one in self.beat(heartbeat).pending]
            content = json.dumps(reply | {"interval_seconds": 0.2}).encode()
        kept = {
            name: value for name, value in answer.headers.items() if name.lower().startswith(("bdn-", "x-bdn", "etag"))
        }
        return Answer(answer.status_code, kept, content)


def command_lines() -> dict[int, str]:
    """Of all processes of this machine, by their ids."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found[int(path.parent.name)] = path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return found


@contextmanager
def ending_ranks(root: Path) -> Iterator[None]:
    """Kill the ranks that a failed test leaves running below ``root``: they outlive their agents."""
    try:
        yield
    finally:
        for pid, line in command_lines().items():
            if f"{root}/" in line:
                with suppress(OSError):  # bwrap has one child, process 1 of the rank
                    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                    for one in (*map(int, children), pid):
                        os.kill(one, signal.SIGKILL)


def left_of_runs(root: Path) -> list[str]:
    """What a node with this data directory still has of its ranks: processes, mounts, directories, stages, volumes."""
    cache = root / "cache"
    folders = [root / "runs", cache / "jobs", cache / "mounts", cache / "views"]
    names = [str(path) for folder in folders if folder.is_dir() for path in folder.iterdir() if path.name[0] != "."]
    stages = [
        path for path in (cache / "stages").glob("*.json") if json.loads(path.read_bytes())["state"] != "RELEASED"
    ]
    processes = [line for line in command_lines().values() if str(root) in line]
    return [*names, *map(str, stages), *processes, *map(str, mounts_below(root))]
