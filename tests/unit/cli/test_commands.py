"""What commands ask for, say and end with, where it takes no service to find out."""

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bdn.cli import admin, ls, tokens, why
from bdn.cli.main import main as bdn
from bdn.cli.operations import _eviction_lines, is_path
from bdn.cli.output import in_options
from bdn.cli.stage import _seconds, stage_code
from bdn.core.errors import AuthRequiredError, NoFilesMatchedError
from bdn.net.client import Params
from bdn.wire.access_schema import NewToken, Token, TokenRequest
from bdn.wire.event_schema import MANIFESTS_AT_ONCE, EventDocument, Named
from bdn.wire.heartbeat_schema import AgentDocument
from bdn.wire.mirror_schema import HeldManifest, HeldManifests, Holding, StoreUse
from bdn.wire.operation_schema import Eviction, EvictionRequest
from bdn.wire.shapes import ErrorBody, Items, Page
from bdn.wire.stage_schema import StageDocument, StageState, TierUse
from bdn.wire.training_schema import (
    JOBS_AT_ONCE,
    OwnFields,
    ProjectName,
    TrainingJob,
    TrainingJobsAnswer,
    TrainingJobSearch,
)
from tests.support.content.names import named

MADE = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FAR = MADE.replace(year=2126)
MANIFESTS = [str(named(f"revision {number}")) for number in range(2 * MANIFESTS_AT_ONCE + 1)]
ERROR = ErrorBody(code="NOT_FOUND", message="chunk b3:… does not exist", retryable=True, details={})


def run(*arguments: str) -> Result:
    return CliRunner().invoke(admin.main, arguments)


class Client:
    """What a mirror would answer."""

    def __init__(self) -> None:
        self.asked: list[TokenRequest] = []

    async def create_token(self, request: TokenRequest) -> NewToken:
        self.asked.append(request)
        return NewToken(**self._token(request).model_dump(), token="bdn_sesame")

    async def tokens(self) -> Items[Token]:
        return Items[Token](items=[self._token(request) for request in self.asked])

    @staticmethod
    def _token(request: TokenRequest) -> Token:
        return Token(
            id="tok_1", name=request.name, organisation=request.organisation, role=request.role, cluster=request.cluster,
            created_at=MADE, expires_at=None, revoked_at=None,
        )  # fmt: skip

    async def held(self) -> HeldManifests:
        nodes = {
            "c/node": Holding(
                manifest=MANIFESTS[0], bytes=17_000_000, held_by=["job"], last_used=time.time() - 3.5 * 86400
            ),
            "c/cache": Holding(manifest=MANIFESTS[0], bytes=0, complete=False, cluster_bytes=5_000_000),
            "c/away": Holding(manifest=MANIFESTS[0], bytes=0, held_by=["pull:./m"]),
        }
        one = HeldManifest(
            manifest=MANIFESTS[0],
            sources=["hf://o/m"],
            files_total=12,
            bytes_total=17_000_000,
            mirror=True,
            nodes=nodes,
        )
        other = one.model_copy(
            update={
                "sources": ["hf://o/gone"],
                "nodes": {},
                "restorable_until": FAR,
                "files_total": None,
                "bytes_total": None,
            }
        )
        due = other.model_copy(update={"restorable_until": MADE})
        return HeldManifests(
            items=[one, other, due], store=StoreUse(bytes_stored=5_000_000, disk_free=10**9, disk_total=2 * 10**9)
        )

    async def agents(self) -> Page[AgentDocument]:
        use = TierUse(budget=10, committed=10, reserved=0, leased=0, problem="Input/output error")
        one = AgentDocument(
            node="n", cluster="c", roles=["node"], version="1", advertise=None, tiers={"node": use},
            last_heartbeat=MADE, alive=True, manifests=1, unsynced_bytes=3_000_000,
        )  # fmt: skip
        return Page[AgentDocument](items=[one])

    async def remove_agent(self, node: str, cluster: str | None) -> AgentDocument:
        (agent,) = (await self.agents()).items
        return agent.model_copy(update={"node": node, "cluster": cluster or agent.cluster})

    async def named(self, of: str) -> Named:
        return Named(of=of, kind="source", manifests={one: [of] for one in MANIFESTS})

    async def events(self, params: Params) -> Page[EventDocument]:
        asked: Any = params["manifest"]
        assert len(asked) <= MANIFESTS_AT_ONCE  # the mirror refuses more
        numbers = [MANIFESTS.index(one) for one in reversed(asked)]
        return Page[EventDocument](items=[self._event(number) for number in numbers])

    @staticmethod
    def _event(number: int) -> EventDocument:
        at = MADE + timedelta(minutes=number)  # the revisions came one after the other
        return EventDocument(
            id=f"evt_{number}", at=at, kind="restored", manifest=MANIFESTS[number], facts={}, sentence=f"was number {number}"
        )  # fmt: skip


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    client = Client()

    @asynccontextmanager
    async def reachable_mirror(_: object) -> AsyncIterator[Client]:
        yield client

    for module in (ls, tokens, why):
        monkeypatch.setattr(module, "reachable_mirror", reachable_mirror)
    return client


@pytest.mark.parametrize(("arguments", "words"), [
    ("evict --lru 0", "error: --lru: Input should be greater than 0\n"),
    ("evict", "exactly one"),
    ("evict --all --job train-7", "exactly one"),
    ("evict --all --plan evi_1", "add force"),
    ("prefetch hf://org/model", "name the target"),
    ("verify", ""),
    ("verify hf://org/model --all", ""),
    ("verify /mnt/model --tier node", "this machine's agent verifies a path"),
    ("evct --all", "Did you mean 'evict'?"),
    ("evict --nod x", "--node"),
    ("evict hf://org/model --all", "exactly one"),
    ("tokens create n --role controller", ""),
    ("tokens create n --organisation acme", ""),
    ("tokens create n --organisation acme --role king", ""),
    ("tokens create n --organisation a:b --role agent", ""),
    ("tokens create n --organisation acme --role controller --cluster c", ""),
    ("tokens create n --organisation acme --role agent --team research", "team is for tokens of role controller"),
    ("teams create a/b", ""),
    ("tokens create n --organisation acme --role agent --expires soon", ""),
])  # fmt: skip
def test_options_that_do_not_go_together_are_a_matter_of_usage(client: Client, arguments: str, words: str) -> None:
    done = run(*arguments.split())

    assert (done.exit_code, words in done.output, client.asked) == (2, True, [])


def test_a_setting_that_cannot_be_is_named_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BDN_UPLOAD_RATE", "0")

    done = CliRunner().invoke(bdn, ["migrate"])

    assert (done.exit_code, done.output) == (2, "error: BDN_UPLOAD_RATE: Input should be greater than 0 (it is '0')\n")


def test_lists_say_what_an_agent_holds_for_its_cluster_and_why_it_takes_nothing_new(client: Client) -> None:
    short = f"{MANIFESTS[0][:15]}…"
    store = "the mirror's store holds 5 MB of files; its disk has 1 GB free of 2 GB"
    assert run("ls").output.splitlines() == [
        "SOURCE       MANIFEST          FILES  SIZE   LAST USED   WHERE",
        f"hf://o/gone  {short}  -      -      -           evicted from the mirror, restorable until 2126-01-02 03:04Z",
        f"hf://o/gone  {short}  -      -      -           evicted from the mirror, restorable until the next collection",
        f"hf://o/m     {short}  12     17 MB  3 days ago  mirror, 2 nodes, 1 node in part, in use on 2",
        store,
    ]
    assert run("ls", "--full").output.splitlines()[3:] == [
        f"hf://o/m     {MANIFESTS[0]}  12     17 MB  3 days ago  mirror, 2 nodes, 1 node in part, in use on 2",
        "  c/node: whole, 17 MB, in use by job",
        "  c/cache: incomplete, 0 B, 5 MB for its cluster",
        "  c/away: pulled to ./m: the files are there, not in the cache",
        store,
    ]
    assert run("agents").output.splitlines() == [
        "AGENT  STATE  HEARTBEAT             MANIFESTS  TIER  HELD  BEING FILLED  IN USE  BUDGET",
        "c/n    alive  2026-01-02 03:04:05Z  1          node  10 B  0 B           0 B     10 B",
        "c/n: the tier node takes nothing new: Input/output error",
        "c/n: 3 MB of checkpoints not pushed yet",
    ]
    assert run("agents", "ls").output == run("agents").output
    assert run("agents", "--json").output == run("agents", "ls", "--json").output
    assert run("agents", "rm", "n2", "--cluster", "d").output == "d/n2 removed\n"


@pytest.mark.parametrize(("arguments", "words"), [
    ("mirror hf://o/m --mount /a --mount /b", "--mount is given 2 times for 1 source"),
    ("mirror hf://o/m --mount a", "--mount 'a' "),
    ("stage mir_1 --job j --ttl soon", "'soon' is not a duration"),
    ("stage mir_1 --job j --ttl 0", "must be positive and finite"),
    ("stage mir_1 --job j --ttl inf", "must be positive and finite"),
])  # fmt: skip
def test_an_option_that_cannot_be_is_named_as_it_was_written(arguments: str, words: str) -> None:
    done = CliRunner().invoke(bdn, arguments.split())

    assert (done.exit_code, words in done.output) == (2, True), done.output


@pytest.mark.parametrize(("text", "seconds"), [("1h", 3600), ("90", 90), ("0.5", 0.5), ("2d", 2 * 86400)])
def test_a_time_to_live_is_a_duration_or_seconds(text: str, seconds: float) -> None:
    assert _seconds(text) == seconds


def test_messages_of_services_name_options() -> None:
    error = NoFilesMatchedError("hf://o/m", 1, ("*.txt", "a"), ("b",))
    assert in_options(str(error)) == "the 1 file of hf://o/m is not selected by --allow '*.txt', 'a' and --ignore 'b'"


def test_ids_alone_are_printed_when_quiet(client: Client) -> None:
    assert run("ls", "-q").output.splitlines() == [MANIFESTS[0]] * 3
    assert run("agents", "-q").output == "c/n\n"


def test_an_eviction_says_what_is_free_now_and_what_will_be() -> None:
    found = Eviction(
        id="evc_1", status="DONE", created_at=MADE, request=EvictionRequest(all=True), bytes_freed=21_000_000,
        bytes_kept=16_000_000, kept_until=FAR,
    )  # fmt: skip

    (line,) = _eviction_lines(found)
    assert line.startswith(
        "freed 5 MB now; the mirror keeps 16 MB on its disk until 2126-01-02 03:04Z, and they can be"
    )
    assert line.endswith(" (--purge frees them at once) (evc_1)")
    free = found.model_copy(update={"bytes_kept": 0, "kept_until": None})
    assert _eviction_lines(free) == ["freed 21 MB (evc_1)"]


def test_a_new_token_stands_alone_on_standard_output_for_a_shell_to_take_and_is_never_listed(client: Client) -> None:
    arguments = ["tokens", "create", "ci", "--organisation", "acme", "--role", "controller", "--expires", "90d"]
    done = run(*arguments)

    assert (done.exit_code, done.stdout) == (0, "bdn_sesame\n")
    assert "token tok_1 for ci; it is not shown again" in done.stderr
    assert client.asked[0].expires_seconds == 90 * 24 * 3600
    assert json.loads(run(*arguments, "--json").stdout)["token"] == "bdn_sesame"
    quiet = run(*arguments, "--quiet")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "bdn_sesame\n", "")
    for options in ([], ["--json"]):
        listed = run("tokens", "ls", *options)
        assert (listed.exit_code, "tok_1" in listed.stdout, "sesame" in listed.stdout) == (0, True, False)


def test_a_source_with_hundreds_of_revisions_is_asked_about_piece_by_piece(client: Client) -> None:
    said = run("why", "hf://org/model", "--limit", "2")

    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert lines[0] == "hf://org/model is cached on the mirror"
    assert [line.split()[-1] for line in lines[-3:-1]] == [str(len(MANIFESTS) - 2), str(len(MANIFESTS) - 1)]
    assert lines[-1] == f"and {len(MANIFESTS) - 2} more events: --all prints them"
    assert len(run("why", "hf://org/model", "--all").output.splitlines()) > 2 * len(MANIFESTS)
    assert len(json.loads(run("why", "hf://org/model", "--json").output)["events"]) == 20


def test_what_begins_like_a_path_or_is_there_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert all(map(is_path, ["/mnt/models/llama", "./model", "../model", ".", "model"]))
    assert not any(map(is_path, ["other", "hf://org/model", "s3://bucket/prefix", f"b3:{'0' * 64}"]))


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [("READY", None, 0), ("READY", ERROR, 1), ("FAILED", ERROR, 1), ("STAGING", None, 0), ("STAGING", ERROR, 0)],
)
def test_a_ready_stage_that_lacks_something_is_no_success(
    state: StageState, error: ErrorBody | None, code: int
) -> None:
    stage = StageDocument.model_construct(
        id="stg_1", job_id="job", state=state, created_at=MADE, mounts=[], error=error
    )

    assert stage_code(stage) == code


def test_the_remedy_of_auth_required_names_the_option_of_the_command() -> None:
    said = in_options(str(AuthRequiredError("hf://o/m", "it is gated")))
    assert "Give --secret NAME and store" in said
    assert '"auth' not in said


@pytest.mark.parametrize("count", [JOBS_AT_ONCE - 1, JOBS_AT_ONCE])
def test_jobs_ls__warns_when_there_may_be_more_jobs(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    own = OwnFields(mirror_id=None, cluster=None, waiting_for=None, stopping=False, ranks=[], slowest_rank=None)
    job = TrainingJob.model_construct(
        id="0123456789", name="j", training_project=ProjectName(id="p", name="llama"), node_count=1, created_at=MADE,
        current_status="TRAINING_JOB_RUNNING", error_message=None, bdn=own,
    )  # fmt: skip

    class Mirror:
        async def training_jobs(self, _: TrainingJobSearch) -> TrainingJobsAnswer:
            return TrainingJobsAnswer.model_construct(training_jobs=[job] * count)

    @asynccontextmanager
    async def client() -> AsyncIterator[Mirror]:
        yield Mirror()

    monkeypatch.setattr("bdn.cli.jobs.mirror_client", client)
    done = CliRunner().invoke(bdn, ["jobs", "ls"])

    assert done.stdout.count("0123456789") == count
    assert ("the newest 1,000" in done.stderr) == (count == JOBS_AT_ONCE)
