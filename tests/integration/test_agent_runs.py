"""Ranks of training jobs on a node, in real sandboxes: staged, started on command, followed, stopped, and gone without a trace."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bdn.core.source.uri import CheckpointUri
from bdn.wire.grants import PushGrant
from node_agent.embedded import open_embedded_agent
from tests.support.agent.mounts import unmounting
from tests.support.agent.process import Program
from tests.support.agent.runs import SCRATCH_BYTES, RunMirror, command_lines, left_of_runs, needs_bwrap, tar_of
from tests.support.content.noise import MIB, noise
from tests.support.mirror.process import ServingProcess
from tests.support.waiting import until

pytestmark = needs_bwrap
RUN = "run0000001"
FOREVER = "sleep 86399"


@pytest.fixture
def mirror() -> Iterator[RunMirror]:
    mirror = RunMirror()
    with mirror.running():
        yield mirror


@pytest.fixture
def program(mirror: RunMirror, tmp_path: Path) -> Iterator[Program]:
    given = {"BDN_AGENT_ROLES": "node,job", "BDN_AGENT_JOB_LAUNCHER": "bwrap", "BDN_AGENT_EXPOSURE": "auto"}
    given |= {"BDN_AGENT_SCRATCH_BYTES": str(SCRATCH_BYTES)}
    with unmounting(tmp_path):
        yield Program(tmp_path / "node", mirror.url, given)


async def nothing_is_left(program: Program) -> None:
    """While the agent runs: it may still be busy with the last of it when the mirror has heard of the end."""
    await until(lambda: not left_of_runs(program.root) or None, f"left: {left_of_runs(program.root)}")


async def test_rank__staged_and_started__finds_weights_archive_and_environment(
    mirror: RunMirror, program: Program
) -> None:
    model = mirror.publish({"config.json": b"{}", "deep/weights": b"weights"})
    script = "import os, sys; print(os.environ['NAME'], os.getcwd(), open('/app/model/deep/weights').read())"
    async with program.daemon():
        mirror.place(
            RUN,
            "python3 train.py; ls -A /tmp/loaded_checkpoints; touch /mnt/bt-scratch/file /tmp/file ~/file && echo $HOME",
            "echo second; exit 3",
            "echo third",
            weights={"/app/model": model},
            archive=tar_of({"train.py": script.encode()}),
            loaded="/tmp/loaded_checkpoints",
            environment={"NAME": 'it\'s a "name" with $HOME'},
        )
        report = await mirror.ran(RUN)
        await nothing_is_left(program)

    assert mirror.lines(RUN) == ['it\'s a "name" with $HOME /b10/workspace weights', "/root", "second"]
    assert (report.exit_code, report.error) == (3, None)
    assert report.bytes_done == report.bytes_total
    capacity = mirror.heartbeats[-1].capacity
    assert capacity is not None
    assert (capacity.launcher, capacity.slots) == ("bwrap", 1)
    assert "node=" in mirror.queries[0]
    assert "volume_id=" in mirror.queries[0]


async def test_rank__agent_killed_twice__output_arrives_once_and_in_order(mirror: RunMirror, program: Program) -> None:
    """An answer is lost before the second kill: the same lines come again under the same number, although there are more."""
    last, count = "last", 1200
    async with program.daemon() as agent:
        mirror.place(RUN, f"echo begin; for i in $(seq {count}); do echo line $i; sleep 0.004; done; echo {last}")
        await mirror.reached(RUN, "STAGED")
        await agent.kill()
    async with program.daemon() as agent:
        mirror.want(RUN, "go")
        await until(lambda: len(mirror.lines(RUN)) > 20)
        mirror.loses_answers = True
        seen, batches = len(mirror.lines(RUN)), len(mirror.batches[RUN])
        await until(lambda: len(mirror.batches[RUN]) > batches)
        await until(lambda: printed(program) > seen + 100)
        await agent.kill()
        mirror.loses_answers = False
    async with program.daemon():
        report = await mirror.reached(RUN, "ENDED", "go")
        await nothing_is_left(program)

    assert report.exit_code == 0
    assert mirror.lines(RUN) == ["begin", *(f"line {number}" for number in range(1, count + 1)), last]


def printed(program: Program) -> int:
    """Lines in the file, of which the sent ones are holes."""
    found = re.findall(rb"line (\d+)\n", (program.root / "runs" / f"{RUN}-0" / "shared" / "output").read_bytes())
    return int(found[-1]) if found else 0


async def test_rank__ends_while_agent_is_down__reported_with_all_lines(mirror: RunMirror, program: Program) -> None:
    async with program.daemon() as agent:
        mirror.place(RUN, "echo first; sleep 1; echo last; exit 7")
        await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "go")
        await until(lambda: mirror.lines(RUN) == ["first"])
        await agent.kill()
    await until(lambda: not [line for line in command_lines().values() if str(program.root) in line])
    async with program.daemon():
        report = await mirror.reached(RUN, "ENDED", "go")
        await nothing_is_left(program)

    assert report.exit_code == 7
    assert mirror.lines(RUN) == ["first", "last"]


async def test_exit_codes__as_a_shell_reports_them__and_background_processes_end(
    mirror: RunMirror, program: Program
) -> None:
    behind = f"sleep 9{os.getpid():07}"  # of no other test that runs now
    cases = {
        "runkilled1": ("kill -9 $$", 137),
        "rununknown": ("nosuchprogram 2>/dev/null", 127),
        "runbehind1": (
            f"{behind} & (trap 'echo polite; exit' TERM; touch ready; {behind} & wait) & until [ -e ready ]; do sleep 0.01; done",
            0,
        ),
    }
    async with program.daemon():
        codes = {}
        for run, (command, _) in cases.items():
            mirror.place(run, command)
            codes[run] = (await mirror.ran(run)).exit_code
        await nothing_is_left(program)

    assert codes == {run: code for run, (_, code) in cases.items()}
    assert mirror.lines("runbehind1") == ["polite"]
    assert not [line for line in command_lines().values() if behind in line]


async def test_container__killed_from_outside__reported_as_killed(mirror: RunMirror, program: Program) -> None:
    async with program.daemon():
        mirror.place(RUN, f"echo up; {FOREVER}")
        await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "go")
        await until(lambda: mirror.lines(RUN) == ["up"])
        first = json.loads((program.root / "runs" / f"{RUN}-0" / "info").read_bytes())["child-pid"]
        os.kill(first, signal.SIGKILL)
        report = await mirror.reached(RUN, "ENDED", "go")
        await nothing_is_left(program)

    assert (report.exit_code, report.error) == (137, None)


async def test_stop__running_rank__script_sees_sigterm_and_nothing_is_left(mirror: RunMirror, program: Program) -> None:
    async with program.daemon():
        mirror.place(RUN, f"trap 'echo saw it; exit 5' TERM; {FOREVER} & echo up; wait", "echo not me")
        await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "go")
        await until(lambda: mirror.lines(RUN) == ["up"])
        mirror.want(RUN, "stop")
        report = await mirror.reached(RUN, "ENDED", "stop")
        await nothing_is_left(program)

    assert report.exit_code == 5
    assert mirror.lines(RUN) == ["up", "saw it"]


@pytest.mark.parametrize("is_staged", [True, False], ids=["staged", "staging"])
async def test_stop__before_go__no_command_runs_and_nothing_is_left(
    mirror: RunMirror, program: Program, is_staged: bool
) -> None:
    model = mirror.publish({"weights": b"weights" * 1000})
    gate, asked = mirror.hold()
    async with program.daemon():
        mirror.place(RUN, "echo never", weights={"/app/model": model})
        await asked.wait()
        if is_staged:
            gate.set()
            await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "stop")
        await mirror.reached(RUN, "ENDED", "stop")
        gate.set()
        await nothing_is_left(program)

    assert mirror.lines(RUN) == []


async def test_weights__root_in_the_sandbox_remounts_them__stay_read_only(mirror: RunMirror, program: Program) -> None:
    model = mirror.publish({"weights": b"weights"})
    async with program.daemon():
        mirror.place(
            RUN,
            "for way in remount,rw remount,bind,rw; do mount -o $way /app/model; done 2>/dev/null;"
            "unshare -rm mount -o remount,bind,rw /app/model 2>/dev/null && echo remounted in a namespace of its own;"
            "umount /app/model 2>/dev/null; id -u; grep CapEff /proc/self/status;"
            "for file in /app/model/weights /app/model/new /etc/new /usr/new; do echo x 2>/dev/null >$file || echo refused; done;"
            "rm -f /app/model/weights 2>/dev/null || echo refused; echo $(cat /app/model/weights); ls /etc/shadow",
            weights={"/app/model": model},
        )
        await mirror.ran(RUN)

    lines = mirror.lines(RUN)
    assert lines[:2] == ["0", "CapEff:\t0000000000000000"]
    assert [line for line in lines if line == "refused"] == 5 * ["refused"]
    assert lines[-2] == "weights"
    assert "No such file" in lines[-1]


async def test_kernel__root_in_the_sandbox__changes_no_setting_of_the_machine(
    mirror: RunMirror, program: Program
) -> None:
    async with program.daemon():
        mirror.place(
            RUN,
            "for file in kernel/core_pattern kernel/modprobe vm/drop_caches; do"
            " (: >>/proc/sys/$file) 2>/dev/null && echo opened $file || echo refused; done;"
            "for folder in sys acpi driver fs scsi irq bus; do"
            " find /proc/$folder /proc/sysrq-trigger -name binfmt_misc -prune -o -type f -writable -print 2>/dev/null; done; cat /proc/sys/kernel/ostype",
        )
        await mirror.ran(RUN)

    assert mirror.lines(RUN) == [*(3 * ["refused"]), "Linux"]


async def test_secrets__while_the_commands_run__in_no_file_and_no_argument(mirror: RunMirror, program: Program) -> None:
    secret = "s3cret" + "-of-the-job"
    async with program.daemon():
        mirror.place(RUN, f'echo "${{TOKEN%-*}}"; {FOREVER}', environment={"TOKEN": secret})
        await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "go")
        await until(lambda: mirror.lines(RUN) == ["s3cret-of-the"])
        files = [path for path in program.root.rglob("*") if path.is_file() and not path.is_symlink()]
        found = [path for path in files if secret.encode() in path.read_bytes()]
        spoken = [line for line in command_lines().values() if secret in line]
        mode = (program.root / "runs").stat().st_mode & 0o777
        mirror.want(RUN, "stop")
        await mirror.reached(RUN, "ENDED", "stop")

    assert (found, spoken, mode) == ([], [], 0o700)


async def test_output__many_lines_and_a_long_one__all_arrive_once_and_in_order(
    mirror: RunMirror, program: Program
) -> None:
    async with program.daemon():
        mirror.place(RUN, "seq 5000; yes same | head -n 1000; printf '%0100000d\\n' 7; printf 'no newline'")
        await mirror.ran(RUN)

    lines = mirror.lines(RUN)
    assert lines[:6000] == [*map(str, range(1, 5001)), *(1000 * ["same"])]
    assert ("".join(lines[6000:-1]), lines[-1]) == (99_999 * "0" + "7", "no newline")


async def test_scratch__used_by_the_commands__is_in_the_final_report(mirror: RunMirror, program: Program) -> None:
    written = 20 * MIB
    async with program.daemon():
        for run, command in (("runempty01", "true"), (RUN, f"head -c {written} /dev/zero >$HOME/file")):
            mirror.place(run, command)
            await mirror.ran(run)
    empty, full = mirror.report("runempty01"), mirror.report(RUN)

    assert empty is not None
    assert full is not None
    assert empty.scratch_limit_bytes == full.scratch_limit_bytes == SCRATCH_BYTES
    assert empty.scratch_bytes is not None
    assert full.scratch_bytes is not None
    assert written <= full.scratch_bytes - empty.scratch_bytes < written + MIB


async def test_scratch__over_its_bound__ends_the_rank_with_scratch_full(mirror: RunMirror, program: Program) -> None:
    async with program.daemon(
        BDN_AGENT_EXPOSURE="symlink", BDN_AGENT_SCRATCH_BYTES="16777216"
    ):  # no image can be mounted
        mirror.place(RUN, f"head -c 40000000 /dev/zero >~/file; {FOREVER}")
        report = await mirror.ran(RUN)
        await nothing_is_left(program)

    assert report.error is not None
    assert report.error.code == "SCRATCH_FULL"


async def test_cache_full__rank_waits_until_another_has_ended(mirror: RunMirror, program: Program) -> None:
    def is_waiting() -> bool:
        report = mirror.report(RUN)
        return report is not None and report.error is not None and report.error.code == "CACHE_FULL"

    async with program.daemon(BDN_AGENT_CACHE_BYTES=str(SCRATCH_BYTES * 3 // 2), BDN_AGENT_CLUSTER_CACHE_BYTES="0"):
        model = mirror.publish({"weights": noise(9 * MIB + 1, 2)})
        mirror.place("runfirst01", "true", weights={"/app/model": model})
        await mirror.reached("runfirst01", "STAGED")
        mirror.place(RUN, "true")
        await until(is_waiting)
        mirror.want("runfirst01", "stop")
        assert (await mirror.reached(RUN, "STAGED")).error is None
        mirror.want(RUN, "stop")
        await mirror.reached(RUN, "ENDED", "stop")


async def test_gpus__of_another_rank__are_waited_for_also_after_a_kill(mirror: RunMirror, program: Program) -> None:
    def error_of(run: str) -> str | None:
        report = mirror.report(run)
        return None if report is None or report.error is None else report.error.message

    async with program.daemon(BDN_AGENT_GPU="H200:2") as agent:
        mirror.place(RUN, "true", gpus=1)
        await mirror.reached(RUN, "STAGED")
        await agent.kill()
    async with program.daemon(BDN_AGENT_GPU="H200:2"):
        mirror.place("runtwogpus", "true", gpus=2)
        await until(lambda: error_of("runtwogpus"))
        waits = error_of("runtwogpus")
        mirror.place("runonegpu1", "true", gpus=1)
        await mirror.reached("runonegpu1", "STAGED")
        mirror.place("runthreegp", "true", gpus=3)
        refused = await mirror.reached("runthreegp", "ENDED", "stage")
        for run in (RUN, "runonegpu1"):
            mirror.want(run, "stop")
            await mirror.reached(run, "ENDED", "stop")
        await mirror.reached("runtwogpus", "STAGED")
        mirror.want("runtwogpus", "stop")
        await mirror.reached("runtwogpus", "ENDED", "stop")
        await nothing_is_left(program)

    assert waits == "the rank needs 2 GPUs, and 1 of this node are free"
    assert refused.error is not None
    assert refused.error.message == "the rank needs 3 GPUs, and 0 of this node are free"
    capacity = mirror.heartbeats[-1].capacity
    assert capacity is not None
    assert (capacity.gpu_type, capacity.gpus) == ("H200", 2)


async def test_gpus__of_a_rank_that_still_pushes__are_free(mirror: RunMirror, program: Program) -> None:
    granted = PushGrant("org", CheckpointUri("llama", RUN), 4e9)
    async with program.daemon(BDN_AGENT_GPU="H200:1", BDN_AGENT_SETTLE_SECONDS="0"):
        mirror.place(
            RUN,
            "mkdir /mnt/ckpts/one; echo weights >/mnt/ckpts/one/model",
            gpus=1,
            checkpoints="/mnt/ckpts",
            checkpoint_bytes=SCRATCH_BYTES,
            push_grant=mirror.signer.sign(granted),
        )
        await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "go")
        mirror.place("runsecond1", "true", gpus=1)
        await mirror.reached("runsecond1", "STAGED")
        report = mirror.report(RUN)
        mirror.want("runsecond1", "stop")
        await mirror.reached("runsecond1", "ENDED", "stop")

    assert report is not None
    assert report.state == "RUNNING"  # this mirror takes no push


async def test_run_directory__too_many_files__ends_the_rank_with_scratch_full(
    mirror: RunMirror, program: Program
) -> None:
    async with program.daemon():
        mirror.place(RUN, f"cd /b10/run; seq 10001 | xargs touch; {FOREVER}")
        report = await mirror.ran(RUN)
        await nothing_is_left(program)

    assert report.error is not None
    assert report.error.code == "SCRATCH_FULL"


async def test_archive__leads_out__rank_ends_with_invalid_request_and_leaves_nothing(
    mirror: RunMirror, program: Program
) -> None:
    async with program.daemon():
        mirror.place(RUN, "echo never", archive=tar_of({"../../escaped": b"x"}))
        report = await mirror.reached(RUN, "ENDED", "stage")
        await nothing_is_left(program)

    assert report.error is not None
    assert (report.error.code, "'../../escaped' leads out" in report.error.message) == ("INVALID_REQUEST", True)
    assert not list(program.root.rglob("escaped"))


async def test_place__that_cannot_be_mounted__rank_ends_before_it_is_staged(
    mirror: RunMirror, program: Program
) -> None:
    model = mirror.publish({"weights": b"weights"})
    async with program.daemon():
        mirror.place(RUN, "echo never", weights={"/usr/new/model": model})
        report = await mirror.reached(RUN, "ENDED", "stage")
        await nothing_is_left(program)

    assert report.error is not None
    assert re.search(r"bwrap could not start the rank: bwrap: .*/usr/new", report.error.message)


async def test_what_a_job_writes__checkpoints_are_pushed_at_its_end_and_caches_stay(
    mirror: RunMirror, program: Program, tmp_path: Path
) -> None:
    """The last checkpoint is written in the handler of SIGTERM."""
    async with await ServingProcess.start(tmp_path / "mirror") as real:
        mirror.behind = real.url

        async def granted(path: str, **body: object) -> str:
            answer = await real.http.post(path, json=body)
            assert answer.is_success, answer.text
            return str(answer.json()["grant"])

        async with program.daemon(BDN_AGENT_SETTLE_SECONDS="0", BDN_AGENT_KEEP_CHECKPOINT="false"):
            mirror.place("runfirst01", "true")
            await mirror.ran("runfirst01")
            volume = re.findall(r"volume_id=(\w+)", mirror.queries[0])[0]
            mirror.place(
                RUN,
                f"cd /mnt/ckpts; trap 'mkdir last; echo weights >last/model; exit 0' TERM; mkdir one; echo weights >one/model;"
                f"echo kept >/root/.cache/user_artifacts/file; echo up; {FOREVER} & wait",
                checkpoints="/mnt/ckpts",
                checkpoint_bytes=SCRATCH_BYTES,
                push_grant=await granted("/pushes/grants", job=f"bt://llama@{RUN}"),
                caches={"project": "/root/.cache/user_artifacts", "team": "/root/.cache/team_artifacts"},
                cache_grant=await granted("/caches", project="llama", cluster="default", volume_id=volume),
            )
            await mirror.reached(RUN, "STAGED")
            assert [len(beat.caches) for beat in mirror.heartbeats if beat.caches]
            mirror.want(RUN, "go")
            await until(lambda: mirror.lines(RUN) == ["up"])
            mirror.want(RUN, "stop")
            report = await mirror.reached(RUN, "ENDED", "stop")
            await nothing_is_left(program)
            found = (await real.http.get("/checkpoints")).json()["items"]

    assert {one["checkpoint_id"] for one in found} == {"one", "last"}
    assert (report.exit_code, report.sync_status) == (0, "COMPLETED")
    assert [path.read_text() for path in (program.root / "volumes").rglob("file")] == ["kept\n"]


@pytest.mark.parametrize(("environment", "takes_jobs"), [
    ({}, True),
    ({"BDN_AGENT_ROLES": "node,cluster"}, False),
    ({"PATH": "/nonexistent"}, False),  # no launcher: the agent starts all the same
])  # fmt: skip
async def test_up__launcher_works_and_no_roles_are_set__agent_takes_jobs(
    mirror: RunMirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], takes_jobs: bool
) -> None:
    for name, value in {"BDN_AGENT_DATA_PORT": "0", "BDN_AGENT_EXPOSURE": "none", **environment}.items():
        monkeypatch.setenv(name, value)
    with unmounting(tmp_path):
        async with open_embedded_agent(
            mirror_url=mirror.url, token=None, data_dir=tmp_path, serve=True, is_alone=False
        ):
            assert ("job" in mirror.heartbeats[-1].roles, bool(mirror.heartbeats[-1].capacity)) == 2 * (takes_jobs,)


async def test_lost__unknown_run_or_another_boot__reported_and_never_started(
    mirror: RunMirror, program: Program
) -> None:
    async with program.daemon() as agent:
        mirror.want("runabsent1", "go")
        mirror.want("runabsent2", "stage")
        await mirror.reached("runabsent1", "LOST")
        await mirror.reached("runabsent2", "LOST")
        mirror.place(RUN, "echo never")
        await mirror.reached(RUN, "STAGED")
        mirror.want(RUN, "stop")
        await mirror.reached(RUN, "ENDED", "stop")
        mirror.place("runreboot1", "echo never")
        await mirror.reached("runreboot1", "STAGED")
        await agent.kill()
    record = program.root / "runs" / "runreboot1-0" / "spec.json"
    first = json.loads(record.with_name("info").read_bytes())["child-pid"]
    os.kill(first, signal.SIGKILL)  # as the end of the machine does
    record.write_text(json.dumps(json.loads(record.read_bytes()) | {"boot": "an earlier one"}))
    async with program.daemon():
        mirror.want("runreboot1", "go")
        await mirror.reached("runreboot1", "LOST", "go")
        await nothing_is_left(program)

    assert mirror.lines("runreboot1") == []


async def test_run__forgotten_by_the_mirror_while_the_agent_was_down__leaves_nothing(
    mirror: RunMirror, program: Program
) -> None:
    """One has ended, one runs, one waits for its start."""
    async with program.daemon() as agent:
        for run, command in ((RUN, "echo done"), ("runforever", f"echo done; {FOREVER}"), ("runstaged1", "echo done")):
            mirror.place(run, command)
            await mirror.reached(run, "STAGED")
        for run in (RUN, "runforever"):
            mirror.want(run, "go")
            await until(lambda run=run: mirror.lines(run) == ["done"])  # type: ignore[misc]
        await agent.kill()
    mirror.specs.clear()
    mirror.commands.clear()
    async with program.daemon():
        await nothing_is_left(program)
    assert mirror.lines("runstaged1") == []


async def test_stop__agent_killed_between_two_directories_of_a_rank__nothing_is_left(
    mirror: RunMirror, program: Program
) -> None:
    """A rank that is prepared again has no directory for a moment, but a job volume and a stage."""
    model = mirror.publish({"weights": b"weights" * 1000})
    gate, asked = mirror.hold()
    async with program.daemon() as agent:
        mirror.place(RUN, "echo never", weights={"/app/model": model})
        await asked.wait()
        await agent.kill()
    gate.set()
    (program.root / "runs" / f"{RUN}-0").rename(program.root / "runs" / ".trash" / "first")
    mirror.commands.clear()
    mirror.want(RUN, "stop")
    async with program.daemon():
        await mirror.reached(RUN, "ENDED", "stop")
        await nothing_is_left(program)
