"""A rank in a pod: prepared, started, followed, and ended in every way that a pod ends. Real processes, and a real mirror for checkpoints."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from bdn.core.errors import BdnError
from bdn.core.training.environment import WORKSPACE
from node_agent.run.liveness import Liveness
from node_agent.run.pod import Follower, PodRecord, PodSettings
from tests.support.agent.pod import CHECKPOINTS, RankPod
from tests.support.agent.runs import RunMirror, needs_bwrap, tar_of
from tests.support.mirror.process import ServingProcess
from tests.support.mirror.service import MirrorUnderTest
from tests.support.mirror.training_jobs import JobAgent, JobClient, runtime, spec
from tests.support.waiting import until

pytestmark = needs_bwrap
RUN = "run0000001"
PROJECT = {"BT_TRAINING_PROJECT_ID": "abcdefghij"}
FOREVER = "sleep 86399"


@pytest.fixture
def mirror() -> Iterator[RunMirror]:
    mirror = RunMirror()
    with mirror.running():
        yield mirror


@pytest.fixture
def pod(mirror: RunMirror, tmp_path: Path) -> RankPod:
    return RankPod(tmp_path / "pod", mirror.url, RUN)


def place(mirror: RunMirror, *commands: str, **changes: Any) -> None:
    mirror.place(RUN, *commands, **{"environment": PROJECT, **changes})


async def printed(mirror: RunMirror, *lines: str) -> None:
    await until(lambda: mirror.lines(RUN) == list(lines), f"{mirror.lines(RUN)}")


async def test_pod__prepared_started_and_ended__commands_find_everything_and_output_is_sent(
    mirror: RunMirror, pod: RankPod
) -> None:
    archive = tar_of({"train.py": b"print(open('data').read())", "data": b"7"})
    (pod.root / "b10/archive/archive.tgz").write_bytes(archive)
    secret = 'it\'s a "secret" with $HOME'
    place(
        mirror,
        'python3 train.py; echo "$SECRET" $PWD; ls /b10/run',
        "echo failing; exit 3",
        "echo third",
        archive=archive,
        environment={**PROJECT, "SECRET": secret},
    )
    await pod.prepared(is_confined=True)
    assert pod.directory.env.stat().st_mode & 0o777 == 0o600
    async with pod.program("follow", is_confined=True) as follow:
        with pod.main() as main:
            await until(lambda: pod.directory.is_ready)
            assert not pod.directory.is_going
            pod.go()
            assert await main.exit_code() == 3
            assert await follow.wait() == 0, pod.log

    assert mirror.lines(RUN) == ["7", f"{secret} /b10/workspace", *LISTED, "failing"]
    assert "node=node-1" in mirror.queries[0]
    assert "boot_id=uid-1" in mirror.queries[0]
    assert secret not in pod.log
    assert pod.termination.read_text() == ""


LISTED = ["alive", "command.000", "command.001", "command.002", "go", "output", "ready", "start.sh"]


# As the kubelet stops a container that has just started: before the program handles signals.
STOPPED_EARLY = """
import os, signal, sys
from node_agent.run.__main__ import main

class Stopping:
    def find_spec(self, name, path, target=None):
        if name == "node_agent.run.pod_program":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stopping())
main()
"""


@pytest.mark.parametrize(("command", "code"), [("prepare", 143), ("follow", 0)])
async def test_program__sigterm_before_it_handles_signals__is_not_lost(
    mirror: RunMirror, pod: RankPod, command: str, code: int
) -> None:
    if command == "follow":
        place(mirror, "true")
        await pod.prepared()
    async with pod.program(command, program=(sys.executable, "-c", STOPPED_EARLY)) as process:
        assert await process.wait() == code


async def test_prepare__mirror_away_without_the_newest_keys_and_ignorant_of_the_pod__waits_for_all(
    mirror: RunMirror, pod: RankPod
) -> None:
    mirror.down = mirror.lacks_keys = True
    async with pod.program("prepare") as process:
        await until(lambda: "waiting for the mirror" in pod.log)
        mirror.down = False
        await until(lambda: mirror.queries)
        mirror.lacks_keys, asked = False, len(mirror.queries)
        await until(lambda: len(mirror.queries) > asked + 1)  # the first may have been on its way
        place(mirror, "true")
        assert await process.wait() == 0, pod.log
    assert pod.directory.env.exists()


async def test_prepare__sigterm_while_it_waits__ends_at_once(mirror: RunMirror, pod: RankPod) -> None:
    async with pod.program("prepare") as process:
        await until(lambda: mirror.queries)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 143


async def test_prepare__repeated_after_it_was_killed__leaves_the_same_files(mirror: RunMirror, pod: RankPod) -> None:
    place(mirror, "cat kept", archive=tar_of({"kept": b"content", "deep/er/file": b""}))
    (pod.root / "b10/archive/archive.tgz").write_bytes(tar_of({"kept": b"content"}))
    (pod.workspace / "deep/er").mkdir(parents=True)
    (pod.workspace / "half").write_bytes(b"")
    (pod.workspace / "link").symlink_to(pod.root / "b10/archive")
    await pod.prepared()
    await pod.prepared()
    assert [path.name for path in pod.workspace.iterdir()] == ["kept"]
    assert (pod.root / "b10/archive/archive.tgz").exists()


async def test_prepare__archive_leads_out__fails_with_a_message_for_kubernetes(mirror: RunMirror, pod: RankPod) -> None:
    place(mirror, "true", archive=b"")
    (pod.root / "b10/archive/archive.tgz").write_bytes(tar_of({"../../escaped": b"x"}))
    async with pod.program("prepare") as process:
        assert await process.wait() == 2
    message = pod.termination.read_text()
    assert "'../../escaped' leads out of the workspace [INVALID_REQUEST]" in message
    assert f"error: {message}\n" in pod.log
    assert not list(pod.root.rglob("escaped"))


async def test_follow__main_never_starts__sigterm_ends_it(mirror: RunMirror, pod: RankPod) -> None:
    place(mirror, "true")
    await pod.prepared()
    async with pod.program("follow") as follow:
        pod.go()
        await until(lambda: pod.directory.is_going)
        follow.send_signal(signal.SIGTERM)
        assert await follow.wait() == 0, pod.log
    assert mirror.lines(RUN) == []


async def test_follow__started_after_main_has_ended__sends_what_it_printed(mirror: RunMirror, pod: RankPod) -> None:
    place(mirror, "echo done")
    await pod.prepared()
    pod.directory.go()
    with pod.main() as main:
        assert await main.exit_code() == 0
    async with pod.program("follow") as follow:
        assert await follow.wait() == 0, pod.log
    assert mirror.lines(RUN) == ["done"]


async def test_main__without_its_working_directory__ends_with_97_and_so_does_follow(
    mirror: RunMirror, pod: RankPod
) -> None:
    place(mirror, "true")
    await pod.prepared()
    async with pod.program("follow") as follow:
        with pod.main(working_dir="/nowhere") as main:
            assert await main.exit_code() == 97
            assert await follow.wait() == 0, pod.log
    assert "/nowhere" in "".join(mirror.lines(RUN))


async def test_follow__sigterm_while_main_runs__sends_all_until_mains_end(mirror: RunMirror, pod: RankPod) -> None:
    """As of a pod that is deleted: main sees the signal at the same time, and takes its time."""
    place(
        mirror,
        f"trap 'echo saw it; until [ -e end ]; do sleep 0.05; done; echo last; exit 5' TERM; echo up; {FOREVER} & wait",
    )
    await pod.prepared()
    pod.go()
    async with pod.program("follow") as follow:
        with pod.main() as main:
            await printed(mirror, "up")
            follow.send_signal(signal.SIGTERM)
            main.signal(signal.SIGTERM)
            await printed(mirror, "up", "saw it")
            assert follow.returncode is None
            (pod.workspace / "end").touch()
            assert await main.exit_code() == 5
            assert await follow.wait() == 0, pod.log
    assert mirror.lines(RUN) == ["up", "saw it", "last"]


async def test_follow__command_leaves_a_process_behind__ends_after_that_process(
    mirror: RunMirror, pod: RankPod
) -> None:
    left = "(exec 2>/dev/null; trap 'until [ -e end ]; do sleep 0.05; done; echo behind; exit' TERM; touch begun; while :; do sleep 0.05; done) &"
    place(mirror, f"{left} until [ -e begun ]; do sleep 0.01; done; echo command")
    await pod.prepared()
    pod.go()
    async with pod.program("follow") as follow:
        with pod.main() as main:
            await printed(mirror, "command")
            (pod.workspace / "end").touch()
            assert await main.exit_code() == 0
            assert await follow.wait() == 0, pod.log
    assert mirror.lines(RUN) == ["command", "behind"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda one: one.name)
async def test_main__ended_by_a_signal__checkpoints_and_output_are_sent(
    mirror: RunMirror, pod: RankPod, tmp_path: Path, number: signal.Signals
) -> None:
    """The last checkpoint has not settled, and one is not complete."""
    async with await ServingProcess.start(tmp_path / "mirror") as real:
        mirror.behind = real.url
        job = f"bt://{PROJECT['BT_TRAINING_PROJECT_ID']}@{RUN}#rank-1"
        granted = await real.http.post("/pushes/grants", json={"job": job})
        place(
            mirror,
            f"cd {CHECKPOINTS}; mkdir last tmp-half; echo weights | tee last/model tmp-half/model; {FOREVER} & wait",
            rank=1,
            checkpoints=CHECKPOINTS,
            checkpoint_bytes=10**9,
            push_grant=granted.json()["grant"],
        )
        pod.given["JOB_COMPLETION_INDEX"] = "1"
        await pod.prepared()
        pod.go()
        async with pod.program("follow") as follow:
            with pod.main() as main:
                await printed(mirror, "weights")
                main.signal(number)
                assert await main.exit_code() == 128 + number
                assert await follow.wait() == 0, pod.log
        found = (await real.http.get("/checkpoints")).json()["items"]

    assert [(one["checkpoint_id"], one["source"]) for one in found] == [
        ("last", job.replace("#", "/last#")),
    ]
    assert granted.json()["grant"] not in pod.log


async def test_follow__output_beyond_what_the_log_keeps__is_dropped_with_a_note(
    mirror: RunMirror, pod: RankPod
) -> None:
    place(mirror, "echo first; truncate -s 1T /b10/run/output; echo; echo last")
    await pod.prepared()
    pod.go()
    async with pod.program("follow") as follow:
        with pod.main() as main:
            assert await main.exit_code() == 0
            assert await follow.wait() == 0, pod.log
    assert mirror.lines(RUN)[-1] == "last"
    noted = [text for batch in mirror.batches[RUN].values() for _, text in batch if text.startswith("bdn: ")]
    assert [text.split(" lines ")[1] for text in noted] == [
        "dropped here, because the mirror did not take them in time"
    ]


async def test_follow__mirror_away_at_the_end__sends_the_rest_once_it_is_back(mirror: RunMirror, pod: RankPod) -> None:
    place(mirror, "echo first; until [ -e end ]; do sleep 0.05; done; echo last; exit 7")
    await pod.prepared()
    pod.go()
    async with pod.program("follow") as follow:
        with pod.main() as main:
            await printed(mirror, "first")
            mirror.down = True
            (pod.workspace / "end").touch()
            assert await main.exit_code() == 7
        assert follow.returncode is None
        mirror.down = False
        assert await follow.wait() == 0, pod.log
    assert mirror.lines(RUN) == ["first", "last"]


async def followed(pod: RankPod, patience_seconds: float) -> None:
    """What ``follow`` does, with less patience than an hour."""
    settings = PodSettings(url=pod.url, run=RUN, node="node-1", pod_uid="uid-1")
    record = PodRecord.in_directory(pod.directory)
    with Liveness(pod.directory) as life:
        async with settings.client() as mirror:
            await Follower(settings, record, pod.root, life, mirror, patience_seconds).run()


async def test_follow__mirror_takes_nothing_for_too_long_after_the_end__fails_and_says_what_is_lost(
    mirror: RunMirror, pod: RankPod
) -> None:
    place(mirror, "echo lost")
    await pod.prepared()
    pod.directory.go()
    mirror.down = True
    with pod.main() as main:
        assert await main.exit_code() == 0
    with pytest.raises(BdnError, match="took nothing for 1s after the rank's end, and the rest of its output"):
        await followed(pod, 1)


async def test_follow__checkpoint_refused_for_too_long_after_the_end__fails_with_the_refusal(
    mirror: RunMirror, pod: RankPod, tmp_path: Path
) -> None:
    async with await ServingProcess.start(tmp_path / "mirror", BDN_LIMIT_PUSH_BYTES="1000") as real:
        mirror.behind = real.url
        granted = await real.http.post(
            "/pushes/grants", json={"job": f"bt://{PROJECT['BT_TRAINING_PROJECT_ID']}@{RUN}"}
        )
        place(
            mirror,
            f"mkdir {CHECKPOINTS}/large; head -c 5000 /dev/urandom >{CHECKPOINTS}/large/model; echo done",
            checkpoints=CHECKPOINTS,
            push_grant=granted.json()["grant"],
        )
        await pod.prepared()
        pod.directory.go()
        with pod.main() as main:
            assert await main.exit_code() == 0
        with pytest.raises(BdnError, match="BDN_LIMIT_PUSH_BYTES") as refused:
            await followed(pod, 5)
    assert refused.value.code == "QUOTA_EXCEEDED"
    assert mirror.lines(RUN) == ["done"]


async def test_follow__without_what_prepare_wrote__fails_with_a_message_for_kubernetes(pod: RankPod) -> None:
    async with pod.program("follow") as follow:
        assert await follow.wait() == 1
    assert "[DISK_FAILED]" in pod.termination.read_text()


async def test_job__in_a_pod_of_a_real_mirror__runs_to_its_end(tmp_path: Path) -> None:
    """The mirror's own row, commands, grants, log and checkpoints. An agent's heartbeats stand for what its runner sees of the pod."""
    async with await ServingProcess.start(tmp_path / "mirror") as real:
        mirror = cast("MirrorUnderTest", real)
        agent = JobAgent(mirror, "node-1", boot_id="uid-1")
        await agent.beat()
        made = await real.http.post("/v1/training_projects", json={"training_project": {"name": "llama"}})
        client = JobClient(mirror, made.json()["training_project"]["id"])
        commands = [
            f"mkdir {CHECKPOINTS}/one; echo weights >{CHECKPOINTS}/one/model",
            "echo $BT_NODE_RANK of $BT_GROUP_SIZE",
        ]
        job = await client.create(
            spec(runtime=runtime(start_commands=commands, checkpointing_config={"enabled": True}))
        )
        pod = RankPod(tmp_path / "pod", real.url, job)
        async with pod.program("prepare") as prepare:
            stage = await agent.commanded("stage")
            assert await prepare.wait() == 0, pod.log
        async with pod.program("follow") as follow:
            with pod.main(working_dir=WORKSPACE) as main:
                await agent.report(stage, "STAGED")
                go = await agent.commanded("go")
                pod.go()
                code = await main.exit_code()
                assert await follow.wait() == 0, pod.log
        await agent.report(go, "ENDED", exit_code=code)
        await client.reached(job, "COMPLETED")
        lines = await client.log(job)
        (checkpoint,) = (await real.http.get("/checkpoints")).json()["items"]

    assert "0 of 1" in lines
    assert (checkpoint["checkpoint_id"], checkpoint["source"]) == ("one", f"bt://llama@{job}/one")
