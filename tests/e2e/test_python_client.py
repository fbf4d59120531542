"""``bdn.client`` against a mirror and an agent in processes of their own, and its pulls in a process of their own."""

import asyncio
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import getdoc
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import snapshot_download

import bdn.client
from bdn.client import AsyncClient, Client, Progress
from bdn.core.errors import (
    BdnError,
    CacheTooSmallError,
    InvalidRequestError,
    InvalidSourceError,
    NotFoundError,
    RevisionNotFoundError,
)
from tests.doubles.faults import stall
from tests.doubles.hub import Hub
from tests.support.content.noise import MIB, noise
from tests.support.content.trees import tree
from tests.support.services.cluster import Cluster
from tests.support.services.commands import ROOT, Process, Shell, wait_until

MODEL = {"config.json": b"{}", "deep/model.safetensors": noise(9 * MIB + 1, 2)}
SIZE = sum(map(len, MODEL.values()))
SOURCE = "hf://org/model"


@pytest.fixture(scope="module")
def upstream() -> Iterator[Hub]:
    with Hub() as double:
        double.repo("org/model").commit(MODEL)
        yield double


@pytest.fixture(scope="module")
def cluster(backend: str, tmp_path_factory: pytest.TempPathFactory, upstream: Hub) -> Iterator[Cluster]:
    started = Cluster(tmp_path_factory.mktemp("services"), {"HF_ENDPOINT": upstream.url})
    with started.mirror():
        yield started


@pytest.fixture(scope="module")
def services(cluster: Cluster) -> Iterator[Shell]:
    """A node of a mirror."""
    with cluster.agent() as shell:
        yield shell


@pytest.fixture
def node(services: Shell) -> Iterator[Shell]:
    """The same, without stages afterwards."""
    yield services
    services.told("bdn", "unstage", "--all")


def given(node: Shell) -> dict[str, Any]:
    """Arguments of a client on this node."""
    return {"url": node.extra["BDN_URL"], "agent_socket": node.extra["BDN_AGENT_SOCKET"], "data_dir": node.data}


def staged(node: Shell) -> list[str]:
    """The jobs that have a stage."""
    ended = node.told("bdn", "unstage", "--all")["items"]
    return [stage["job_id"] for stage in ended]


def test_a_block_may_show_a_folder_of_the_hub_cache(node: Shell) -> None:
    with Client(**given(node)) as client:
        mirror = client.mirror([SOURCE], mounts=["/app/model"]).wait()
        with client.stage(mirror, job="train", view="hub") as files:
            assert files.path.name == "models--org--model"
            commit = (files.path / "refs/main").read_text()
            assert tree(files.path / "snapshots" / commit) == MODEL
    assert staged(node) == []


@pytest.mark.production
def test_mirrored_files_are_read_in_a_block_and_released_at_its_end(node: Shell) -> None:
    seen: list[Progress] = []
    with Client(**given(node)) as client:
        pending = client.mirror([SOURCE], mounts=["/app/model"])
        mirror = pending.wait(seen.append)
        assert (mirror.id, mirror.status, mirror.bytes_total) == (pending.id, "READY", SIZE)
        assert pending.latest == mirror

        with client.stage(mirror, job="train", warm=True, progress=seen.append) as files:
            assert files.paths == {"/app/model": files.path}
            assert (files.stage.job_id, tree(files.path)) == ("train", MODEL)
        assert not files.path.exists()
        with client.stage(mirror.id, job="train-2", ttl_seconds=3600) as again:
            assert again.stage.expires_at is not None
            assert tree(again.path) == MODEL

    assert staged(node) == []
    assert list(dict.fromkeys(one.step for one in seen)) == ["mirroring", "staging"]
    for last in (one for one in seen if one.is_last):
        assert (last.bytes_done, last.bytes_total, last.files_total) == (SIZE, SIZE, len(MODEL))


async def test_the_same_for_a_program_of_asyncio(node: Shell) -> None:
    seen: list[Progress] = []
    async with AsyncClient(**given(node)) as client:
        pending = await client.mirror([SOURCE], mounts=["/app/model"])
        mirror = await pending.wait(seen.append)
        async with client.stage(mirror, job="train", progress=seen.append) as files:
            assert tree(files.path) == MODEL
        assert not files.path.exists()
    assert [one.step for one in seen if one.is_last] == ["mirroring", "staging"]


def test_sources_with_mounts_of_their_own_have_a_path_each(node: Shell, upstream: Hub) -> None:
    upstream.repo("org/tokens").commit({"tokenizer.json": b"[]"})
    with Client(**given(node)) as client:
        mirror = client.mirror([SOURCE, "hf://org/tokens"], mounts=["/app/model"], allow=["*.json"]).wait()
        with client.stage(mirror, job="train") as files:
            assert {place: tree(path) for place, path in files.paths.items()} == {
                "/app/model": {"config.json": b"{}"},
                "/models/org/tokens": {"tokenizer.json": b"[]"},
            }
            with pytest.raises(InvalidRequestError, match="has 2 mounts"):
                _ = files.path


class OwnError(Exception):
    pass


def test_an_exception_in_the_block_is_raised_once_the_files_are_released(node: Shell) -> None:
    with Client(**given(node)) as client:
        mirror = client.mirror([SOURCE]).wait()
        with pytest.raises(OwnError), client.stage(mirror, job="train") as files:
            raise OwnError
        assert not files.path.exists()
    assert staged(node) == []


async def test_a_canceled_task_releases_its_files(node: Shell) -> None:
    async with AsyncClient(**given(node)) as client:
        mirror = await (await client.mirror([SOURCE])).wait()
        entered = asyncio.Event()

        async def job() -> None:
            async with client.stage(mirror, job="train"):
                entered.set()
                await asyncio.Event().wait()

        async with asyncio.TaskGroup() as group:
            running = group.create_task(job())
            await entered.wait()
            running.cancel()
    assert staged(node) == []


@pytest.mark.parametrize(("call", "kind", "code"), [
    (lambda client: client.mirror(["hf://org/model@absent"]).wait(), RevisionNotFoundError, "REVISION_NOT_FOUND"),
    (lambda client: client.mirror(["ftp://host/file"]), InvalidSourceError, "INVALID_SOURCE"),
    (lambda client: client.stage("mir_0123456789abcdef01234567", job="train").__enter__(), NotFoundError, "NOT_FOUND"),
    (lambda client: client.stage(client.mirror([SOURCE]).wait(), job="").__enter__(), InvalidRequestError, "INVALID_REQUEST"),
])  # fmt: skip
def test_an_error_of_the_contract_is_raised_as_its_class(
    node: Shell, call: Callable[[Client], object], kind: type[BdnError], code: str
) -> None:
    with Client(**given(node)) as client, pytest.raises(kind) as raised:
        call(client)
    assert (raised.value.code, raised.value.retryable) == (code, False)
    assert raised.value.message == str(raised.value) != ""


def test_an_error_has_the_message_and_the_facts_of_the_command(node: Shell) -> None:
    said = node.told("bdn", "stage", "mir_0123456789abcdef01234567", "--job", "train", code=4)["error"]
    with Client(**given(node)) as client, pytest.raises(NotFoundError) as raised:
        client.stage("mir_0123456789abcdef01234567", job="train").__enter__()
    error = raised.value
    assert (error.code, error.message, error.retryable, error.details()) == tuple(said.values())
    assert error.what == said["details"]["what"]


def test_a_stage_that_fails_leaves_no_stage(cluster: Cluster) -> None:
    with cluster.agent("small", BDN_AGENT_CACHE_BYTES="1MB") as node, Client(**given(node)) as client:
        mirror = client.mirror([SOURCE]).wait()
        with pytest.raises(CacheTooSmallError) as raised, client.stage(mirror, job="train"):
            pytest.fail("the files cannot be here")
        assert raised.value.needed_bytes >= SIZE
        assert staged(node) == []


@pytest.mark.embedded("no service is reached")
def test_a_client_without_services_says_how_to_start_them(tmp_path: Path) -> None:
    nowhere: dict[str, Any] = {
        "url": "http://127.0.0.1:9",
        "agent_socket": tmp_path / "none.sock",
        "data_dir": tmp_path,
    }
    with Client(**nowhere) as client:
        with pytest.raises(BdnError, match="start one with 'bdn up'") as raised:
            client.mirror([SOURCE])
        assert (raised.value.code, raised.value.retryable) == ("STORE_UNAVAILABLE", True)
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.mirror([SOURCE])


# --- programs of their own ---


def program(code: str) -> tuple[str, ...]:
    return (Path(sys.executable).name, "-c", code)


@contextmanager
def interrupted(shell: Shell, code: str) -> Iterator[tuple[Process, Path]]:
    """A program in the background that ends with 130 if it is interrupted, and its output."""
    body = textwrap.indent(textwrap.dedent(code), "    ")
    lines = (
        "import sys, time",
        "from bdn.client import Client",
        "try:",
        body,
        "except KeyboardInterrupt:",
        "    sys.exit(130)",
    )
    command = program("\n".join(lines))
    output = shell.root / f"{command[0]}-{command[1]}.log"
    output.unlink(missing_ok=True)
    with shell.running(*command) as process:
        yield process, output


def test_an_interrupt_in_the_block_releases_the_files(node: Shell) -> None:
    code = """
        with Client() as client:
            mirror = client.mirror(["hf://org/model"]).wait()
            with client.stage(mirror, job="train") as files:
                print("staged", flush=True)
                time.sleep(600)
    """
    with interrupted(node, code) as (process, output):
        wait_until(lambda: "staged" in output.read_text(), what="the stage")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, output.read_text()
    assert staged(node) == []


def test_an_interrupted_wait_leaves_the_mirror_at_work(cluster: Cluster, node: Shell, upstream: Hub) -> None:
    upstream.log.clear()
    upstream.repo("org/slow").commit({"model.safetensors": noise(MIB, 7)})
    upstream.fail(stall(), origin="cdn")
    code = """
        with Client() as client:
            pending = client.mirror(["hf://org/slow"])
            print(pending.id, flush=True)
            pending.wait(lambda progress: print("waiting", flush=True))
    """
    with interrupted(node, code) as (process, output):
        wait_until(lambda: "waiting" in output.read_text(), what="the wait")
        wait_until(lambda: upstream.log.count(origin="cdn"), what="the mirror's request")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, output.read_text()
    upstream.release_stalled()
    with cluster.http() as http:
        mirror = http.get(f"/mirror/{output.read_text().split()[0]}", params={"wait": 60}).json()
    assert mirror["status"] == "READY"


@pytest.mark.embedded("a pull has its own mirror")
@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_pull_puts_the_files_at_a_directory_and_says_how_far_it_is(shell: Shell, hub: Hub, form: str) -> None:
    hub.repo("org/model").commit(MODEL)
    wait, client = ("", "Client") if form == "sync" else ("await ", "AsyncClient")
    code = f"""
import asyncio
from bdn.client import AsyncClient, Client
steps = []
async def main():
    {"async " if wait else ""}with {client}() as client:
        pulled = {wait}client.pull("hf://org/model", "out", progress=steps.append)
        again = {wait}client.pull("hf://org/model", "out", offline=True)
        print(pulled.bytes_transferred, again.bytes_transferred, pulled.files_total)
        print(*(one.step for one in steps if one.is_last and one.bytes_done == one.bytes_total))
asyncio.run(main())
"""
    done = shell.run(*program(code))
    assert done.out.splitlines() == [f"{SIZE} 0 {len(MODEL)}", "mirroring staging"], done.err
    assert tree(shell.root / "out") == MODEL


@pytest.mark.embedded("a pull has its own mirror")
@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_pull_into_the_hub_cache_is_found_offline_by_name(shell: Shell, hub: Hub, form: str) -> None:
    hub.repo("org/model").commit(MODEL)
    wait, client = ("", "Client") if form == "sync" else ("await ", "AsyncClient")
    code = f"""
import asyncio
from bdn.client import AsyncClient, Client
from bdn.core.errors import InvalidRequestError
async def main():
    {"async " if wait else ""}with {client}() as client:
        for wrong in ({{}}, dict(destination="out", hub_cache="hub"), dict(hub_cache=True, link=True), dict(hub_cache=True, replace=True)):
            try:
                {wait}client.pull("hf://org/model", **wrong)
            except InvalidRequestError as error:
                print(error)
        try:
            {wait}client.pull("s3://bucket/model", hub_cache="hub")
        except InvalidRequestError as error:
            print(error)
        for place in ("hub", True):
            print(({wait}client.pull("hf://org/model", hub_cache=place)).bytes_transferred)
asyncio.run(main())
"""
    done = shell.run(*program(code), HF_HUB_CACHE=str(shell.root / "own"))
    *refused, first, second = done.out.splitlines()
    assert (done.code, first, second) == (0, str(SIZE), "0"), done.err
    assert [reason in line for reason, line in zip(
        ("either a destination or hub_cache", "either a destination", "replace and link", "replace and link", "s3://bucket/model is not a repository"),
        refused, strict=True)] == [True] * 5  # fmt: skip
    for root in ("hub", "own"):
        found = snapshot_download("org/model", cache_dir=shell.root / root, local_files_only=True)
        assert tree(Path(found)) == MODEL


@pytest.mark.embedded("a pull has its own mirror")
def test_an_interrupted_pull_leaves_no_directory_and_the_next_one_is_whole(shell: Shell, hub: Hub) -> None:
    hub.repo("org/model").commit(MODEL)
    hub.fail(stall(), origin="cdn")
    code = """
        with Client() as client:
            client.pull("hf://org/model", "out")
    """
    with interrupted(shell, code) as (process, output):
        wait_until(lambda: hub.log.count(origin="cdn"), what="the pull's request")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, output.read_text()
    assert not (shell.root / "out").exists()
    hub.release_stalled()
    assert shell.run(*program('from bdn.client import Client; Client().pull("hf://org/model", "out")')).code == 0
    assert tree(shell.root / "out") == MODEL


# --- the examples of the documentation ---

DOCUMENTS = ("JobStage", "Mirror", "Pulled")  # answers of the services, which the contract describes


def blocks() -> list[str]:
    """The examples of docs/python.md."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


def documented() -> dict[str, str]:
    """The example of each public name that does something."""
    found = {name: getattr(bdn.client, name) for name in bdn.client.__all__ if name not in DOCUMENTS}
    for name in ("Client", "AsyncClient"):
        found |= {f"{name}.{method}": getattr(found[name], method) for method in ("pull", "mirror", "stage", "stages")}
    return {name: textwrap.dedent((getdoc(one) or "").partition("Example::\n")[2]) for name, one in found.items()}


@pytest.mark.parametrize("block", blocks())
def test_an_example_of_the_page_runs(node: Shell, block: str, tmp_path: Path) -> None:
    done = replace(node, root=tmp_path).run(*program(block))
    assert done.code == 0, done.err
    assert staged(node) == []


@pytest.mark.parametrize("name", documented())
def test_an_example_of_a_docstring_runs(node: Shell, name: str, tmp_path: Path) -> None:
    example = documented()[name]
    assert example.strip(), f"{name} has no example"
    kind, wait = ("AsyncClient", "await ") if "async " in example or "await " in example else ("Client", "")
    code = f"""
import asyncio
from bdn.client import *
async def main():
    client = {kind}()
    pending = {wait}client.mirror(["hf://org/model"])
    mirror = {wait}pending.wait()
    opened = client
{textwrap.indent(example, "    ")}
    {wait}opened.close()
asyncio.run(main())
"""
    done = replace(node, root=tmp_path).run(*program(code))
    assert done.code == 0, done.err
