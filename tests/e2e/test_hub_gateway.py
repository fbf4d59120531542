"""The hub gateway of an agent: unmodified clients get through it what the hub gives them, and without the hub what is held."""

import json
import struct
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
import pytest

from bdn.core.chunk import CHUNK_SIZE
from tests.doubles.content import GeneratedContent
from tests.doubles.faults import Fault, answer, drop, flip_byte, hang, stall
from tests.doubles.hub import Hub
from tests.doubles.hub_repository import HubRepository, Json, Kind
from tests.support.content.noise import MIB, noise
from tests.support.mirror.backends import behind
from tests.support.network.ports import free_port
from tests.support.services.cluster import Cluster
from tests.support.services.commands import wait_until
from tests.support.services.hub_clients import Call, HubUser, python_with

NODES: Final = ("node-1", "node-2")
LONGEST_SECONDS: Final = 120
ASKERS: Final = 60


def tensors(size: int, seed: int) -> bytes:
    """A file in the format of safetensors."""
    layout = {"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    head = json.dumps(layout).encode()
    return struct.pack("<Q", len(head)) + head + noise(size, seed)


FILES: Final[dict[str, bytes]] = {
    "config.json": b'{"model_type": "bert"}',
    "model.safetensors": tensors(9 * MIB + 1, 2),
    "small.bin": b"small, and in LFS",
    "nested/deeper/tok+en izer%.json": b'{"version": "1.0"}',
    "nested/unicode-ü中.txt": "ü is text".encode(),
    "nested/empty.txt": b"",
    ".gitattributes": b"*.safetensors filter=lfs\n",
}
LARGE: Final = "model.safetensors"
DIGESTS: Final = {path: sha256(content).hexdigest() for path, content in FILES.items()}


# --- a hub, a mirror and two nodes with a gateway each ---


@dataclass(eq=False)
class Site:
    hub: Hub
    cluster: Cluster
    users: Path
    gateways: Mapping[str, str]
    _numbers: Iterator[int] = field(default_factory=count)

    def new(
        self,
        files: Mapping[str, bytes] = FILES,
        *,
        kind: Kind = "model",
        is_xet: bool = False,
        private: bool = False,
        gated: bool = False,
    ) -> HubRepository:
        """A repository that no test before had a request for."""
        repository = self.hub.repo(f"org/it-{next(self._numbers)}", kind=kind, private=private, gated=gated)
        repository.is_xet = is_xet
        repository.commit(files)
        return repository

    def user(self, endpoint: str, *, is_xet: bool = False, token: str | None = None) -> HubUser:
        return HubUser(endpoint, self.users / f"user-{next(self._numbers)}", token=token, is_xet=is_xet)

    @property
    def content_bytes(self) -> int:
        """What the hub sent of files, the small ones and those of LFS."""
        return self.hub.log.bytes_served("/api/resolve-cache/") + self.hub.log.bytes_served(origin="cdn")


@pytest.fixture(scope="module")
def site(backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    root = tmp_path_factory.mktemp("site")
    with ExitStack() as stack:
        hub = stack.enter_context(Hub())
        extra = {
            "HF_ENDPOINT": hub.url,
            "BDN_GATEWAY_ORGANISATION": "default",
            "BDN_GATEWAY_SECRET": "hub",
            "BDN_SECRET_HUB": hub.token,
        }
        cluster = Cluster(root / "cluster", extra)
        cluster.root.mkdir()
        stack.enter_context(cluster.mirror())
        gateways = {}
        for node in NODES:
            address = f"127.0.0.1:{free_port()}"
            stack.enter_context(cluster.agent(node, BDN_AGENT_GATEWAY=address))
            gateways[node] = f"http://{address}"
            wait_until(lambda url=gateways[node]: is_open(url), what=f"the gateway of {node}")
        yield Site(hub, cluster, root / "users", gateways)
        hub.script.clear()


def is_open(url: str) -> bool:
    with suppress(httpx2.TransportError):
        httpx2.get(f"{url}/api/agent-harnesses", trust_env=False)
        return True
    return False


@pytest.fixture(autouse=True)
def hub(site: Site) -> Iterator[Hub]:
    """The hub works again after each test, and the mirror knows it: it does not ask a silent hub again at once."""
    site.hub.log.clear()
    site.hub.stall_again()
    yield site.hub
    site.hub.script.clear()
    site.hub.release_stalled()
    wait_until(lambda: ASKS["info"].send(site.gateways[NODES[0]], site.new({"a": b""})).status == 200, what="the hub")


@pytest.fixture(params=[False, True], ids=["http", "xet"])
def is_xet(request: pytest.FixtureRequest) -> bool:
    """Whether the client has hf_xet, and may use it."""
    return bool(request.param)


# --- clients ---

MODEL: Final = {"repo_id": "org/model"}
DATA: Final = {"repo_id": "org/data", "repo_type": "dataset"}
CASES: Final[Mapping[str, Call]] = {
    "snapshot of a branch": ("snapshot", MODEL),
    "snapshot, then offline": ("snapshot_again", MODEL),
    "snapshot of a commit": ("snapshot", {**MODEL, "revision": "SHA"}),
    "snapshot of a tag": ("snapshot", {**MODEL, "revision": "v1"}),
    "snapshot of a branch with a slash": ("snapshot", {**MODEL, "revision": "feature/slash"}),
    "snapshot of a pull request": ("snapshot", {**MODEL, "revision": "refs/pr/1"}),
    "snapshot of allowed patterns": ("snapshot", {**MODEL, "allow_patterns": ["*.json"]}),
    "snapshot without ignored patterns": ("snapshot", {**MODEL, "ignore_patterns": ["*.safetensors", "nested/*"]}),
    "snapshot into a folder": ("local_folder", MODEL),
    "snapshot of a dataset": ("snapshot", DATA),
    "snapshot of a space": ("snapshot", {"repo_id": "org/space", "repo_type": "space"}),
    "snapshot of a kernel": ("snapshot", {"repo_id": "org/kernel", "repo_type": "kernel"}),
    "snapshot by a former name": ("snapshot", {"repo_id": "gpt2"}),  # as all that had no namespace
    "file by a former name": ("file", {"repo_id": "gpt2", "filename": "config.json"}),
    "tree by a former name": ("api", {"method": "list_repo_tree", "repo_id": "gpt2"}),
    "snapshot of a missing repository": ("snapshot", {"repo_id": "org/none"}),
    "snapshot of a missing revision": ("snapshot", {**MODEL, "revision": "none"}),
    "snapshot of a missing commit": ("snapshot", {**MODEL, "revision": "0" * 40}),
    "hf download": ("command", {"arguments": ["download", "org/model"]}),
    "hf download of a missing repository": ("command", {"arguments": ["download", "org/none"]}),
    "file by branch": ("file", {**MODEL, "filename": LARGE}),
    "file by commit": ("file", {**MODEL, "filename": "config.json", "revision": "SHA"}),
    "file in LFS, small": ("file", {**MODEL, "filename": "small.bin"}),
    "file in folders": ("file", {**MODEL, "filename": "nested/deeper/tok+en izer%.json"}),
    "file with a name in Unicode": ("file", {**MODEL, "filename": "nested/unicode-ü中.txt"}),
    "file of 0 bytes": ("file", {**MODEL, "filename": "nested/empty.txt"}),
    "file of a pull request": ("file", {**MODEL, "filename": "README.md", "revision": "refs/pr/1"}),
    "missing file": ("file", {**MODEL, "filename": "adapter_config.json"}),
    "missing file, remembered": ("remembered_absence", {**MODEL, "filename": "adapter_config.json"}),
    "missing file of a missing revision": ("file", {**MODEL, "filename": "config.json", "revision": "none"}),
    "file of a missing repository": ("file", {"repo_id": "org/none", "filename": "config.json"}),
    "metadata of a file": ("metadata", {**MODEL, "filename": LARGE}),
    "metadata of a small file": ("metadata", {**MODEL, "filename": "nested/empty.txt"}),
    "safetensors": ("safetensors", MODEL),
    "file system": ("file_system", {"place": "org/model", "path": "nested/unicode-ü中.txt"}),
    "file system, large file": ("file_system", {"place": "org/model", "path": LARGE}),
    "file system, dataset": ("file_system", {"place": "datasets/org/data", "path": "train.csv"}),
    "file system, missing file": ("file_system", {"place": "org/model", "path": "none"}),
    "resolve_revision": ("api", {"method": "resolve_revision", **MODEL}),
    "refs": ("api", {"method": "list_repo_refs", **MODEL, "include_pull_requests": True}),
    "commits": ("api", {"method": "list_repo_commits", **MODEL}),
    "tree": ("api", {"method": "list_repo_tree", **MODEL, "recursive": True}),
    "tree of a folder": ("api", {"method": "list_repo_tree", **MODEL, "path_in_repo": "nested"}),
    "tree of a missing folder": ("api", {"method": "list_repo_tree", **MODEL, "path_in_repo": "none"}),
    "paths": ("api", {"method": "get_paths_info", **MODEL, "paths": ["config.json", "nested", "none"]}),
    "discussions": ("api", {"method": "get_repo_discussions", **MODEL}),
    "access": ("api", {"method": "auth_check", **MODEL}),
    "names of files": ("api", {"method": "list_repo_files", **MODEL}),
    "existence of a file": ("api", {"method": "file_exists", **MODEL, "filename": "config.json"}),
    "existence of a revision": ("api", {"method": "revision_exists", **MODEL, "revision": "none"}),
}
INFOS: Final[Mapping[str, Call]] = {
    "model": ("api", {"method": "model_info", **MODEL}),
    "model with files": ("api", {"method": "model_info", **MODEL, "files_metadata": True}),
    "model at a pull request": ("api", {"method": "model_info", **MODEL, "revision": "refs/pr/1"}),
    "dataset": ("api", {"method": "dataset_info", "repo_id": "org/data"}),
    "space": ("api", {"method": "space_info", "repo_id": "org/space"}),
    "kernel": ("api", {"method": "kernel_info", "repo_id": "org/kernel"}),
}
STATED: Final = ("id", "sha", "private", "gated", "disabled")


@dataclass(frozen=True, eq=False)
class Asked:
    """What the clients got, by route and case; each route is asked once, in one process, with and without hf_xet."""

    site: Site
    commit: str

    @cache  # noqa: B019 - lives as long as its module's fixture
    def results(self, route: str, is_xet: bool) -> dict[str, Any]:
        endpoint = self.site.hub.url if route == "direct" else self.site.gateways[route]
        cases = {"xet": ("xet_available", {}), **CASES, **{f"info of {name}": call for name, call in INFOS.items()}}
        calls = json.loads(json.dumps(list(cases.values())).replace('"SHA"', f'"{self.commit}"'))
        return dict(zip(cases, self.site.user(endpoint, is_xet=is_xet).run(calls), strict=True))


@pytest.fixture(scope="module")
def asked(site: Site) -> Asked:
    model = site.hub.repo("org/model")
    commit = model.commit(FILES)
    model.tag("v1")
    model.commit({"config.json": b"{}"}, branch="feature/slash")
    model.commit({"README.md": b"# proposed\n"}, branch="refs/pr/1")
    model.commit({"config.json": b'{"model_type": "gpt2"}'})
    site.hub.repo("org/data", kind="dataset").commit(
        {"train.csv": b"a,b\n1,2\n3,4\n", "nested/README.txt": b"# data\n"}
    )
    site.hub.repo("org/space", kind="space").commit({"app.py": b"print()\n", "nested/logo.bin": b"logo"})
    site.hub.repo("org/kernel", kind="kernel").commit({"build/kernel.bin": b"kernel", "build.toml": b""})
    site.hub.repo("openai-community/gpt2").commit({"config.json": b"{}", "model.safetensors": tensors(64, 3)})
    site.hub.moved["gpt2"] = "openai-community/gpt2"
    return Asked(site, commit)


@pytest.mark.parametrize("case", CASES)
def test_client_call__through_the_gateway__gets_what_it_gets_from_the_hub(
    asked: Asked, case: str, is_xet: bool
) -> None:
    direct, through = (asked.results(route, is_xet) for route in ("direct", NODES[0]))

    assert direct["xet"] == through["xet"] == is_xet
    assert through[case] == direct[case]


@pytest.mark.parametrize("case", INFOS)
def test_description__through_the_gateway__names_commit_access_and_files(asked: Asked, case: str, is_xet: bool) -> None:
    direct, through = (asked.results(route, is_xet)[f"info of {case}"] for route in ("direct", NODES[0]))

    assert {name: through.get(name) for name in STATED} == {name: direct.get(name) for name in STATED}
    assert through.get("siblings") == direct.get("siblings")


def test_client_with_xet__gets_a_xet_repository_without_xet(site: Site, is_xet: bool) -> None:
    repository = site.new(is_xet=True)
    user = site.user(site.gateways[NODES[0]], is_xet=is_xet)
    options = {"repo_id": repository.repo_id}

    [whole, listing, by_name, large] = user.run(
        [
            ("snapshot", options),
            ("command", {"arguments": ["download", repository.repo_id]}),
            ("file_system", {"place": repository.repo_id, "path": LARGE}),
            ("file", {**options, "filename": LARGE}),
        ]
    )

    assert whole["files"] == listing["files"] == DIGESTS
    assert (by_name["read"][0], large["sha256"]) == (DIGESTS[LARGE], DIGESTS[LARGE])
    assert site.hub.log.count("xet-read-token") == 0


def test_client_with_a_listing_of_the_hub_itself__gets_the_files_without_xet(site: Site) -> None:
    """Such a listing names xet, and the client keeps it for ever."""
    repository = site.new(is_xet=True)
    options = {"repo_id": repository.repo_id, "cache_dir": str(site.users / "kept")}
    site.user(site.hub.url).call("snapshot", **options, allow_patterns=["config.json"])
    [listing] = (site.users / "kept").rglob("trees/*.json")
    assert "xet_hash" in listing.read_text()

    whole = site.user(site.gateways[NODES[0]]).call("snapshot", **options)

    assert whole["files"] == DIGESTS


def test_client__waits_for_a_copy_that_takes_longer_than_its_patience(site: Site) -> None:
    repository = site.new()
    site.hub.fail(stall(at=MIB), origin="cdn", times=None)
    url = f"{site.gateways[NODES[0]]}/{repository.repo_id}/resolve/main/{LARGE}"

    with ThreadPoolExecutor(1) as threads, client() as http:
        running = threads.submit(site.user(site.gateways[NODES[0]]).call, "snapshot", repo_id=repository.repo_id)
        site.hub.log.wait_for("/repos/", LONGEST_SECONDS)
        assert http.get(url, headers={"User-Agent": "unknown/None; hf_hub/2.4.0"}).status_code == 429
        site.hub.script.clear()
        site.hub.release_stalled()
        whole = running.result()

    assert whole["files"] == DIGESTS


def test_client__has_first_bytes_of_a_copy_that_takes_longer_than_its_patience(site: Site) -> None:
    repository = site.new({LARGE: FILES[LARGE]})
    site.hub.log.clear()
    site.hub.stall_again()
    site.hub.fail(stall(at=MIB), origin="cdn", skip=1)  # one of two chunks arrives
    gateway = site.gateways[NODES[0]]
    url = f"{gateway}/{repository.repo_id}/resolve/main/{LARGE}"

    def resumed(start: int) -> bytes | None:
        """What a client gets that has the bytes before; None if it is to repeat the request."""
        headers = {"User-Agent": "unknown/None; hf_hub/2.4.0", "Range": f"bytes={start}-"}
        with client() as http, http.stream("GET", url, headers=headers) as reply:
            got = []
            for piece in reply.iter_bytes() if reply.status_code == 206 else ():
                got.append(piece)
                site.hub.release_stalled()
            return b"".join(got) or None

    with ThreadPoolExecutor(3) as threads:
        running = threads.submit(site.user(gateway).call, "snapshot", repo_id=repository.repo_id)
        parts = dict(zip((0, CHUNK_SIZE), threads.map(resumed, (0, CHUNK_SIZE)), strict=True))
        whole = running.result()

    begun = {start: part for start, part in parts.items() if part is not None}
    assert begun == {start: FILES[LARGE][start:] for start in begun} != {}
    assert (whole["files"], site.content_bytes) == ({LARGE: DIGESTS[LARGE]}, len(FILES[LARGE]))


def test_dataset__is_loaded_whole_and_streaming(site: Site, is_xet: bool) -> None:
    python = python_with("datasets", "pyarrow")
    if python is None:
        pytest.skip("datasets is not installed")
    rows = {"train.csv": b"a,b\n1,2\n3,4\n", "test.csv": b"a,b\n5,6\n", "README.md": b"# data\n"}
    repository = site.new(rows, kind="dataset", is_xet=not is_xet)
    user = HubUser(site.gateways[NODES[0]], site.users / f"datasets-{is_xet}", is_xet=is_xet, python=python)

    loaded = user.run([("dataset", {"repo_id": repository.repo_id, "streaming": way}) for way in (False, True)])

    assert loaded == [{"test": [{"a": 5, "b": 6}], "train": [{"a": 1, "b": 2}, {"a": 3, "b": 4}]}] * 2


@dataclass(frozen=True)
class TinyModel:
    python: Path
    files: Mapping[str, bytes]
    loaded: Any  # from the hub itself


@pytest.fixture(scope="module")
def tiny(site: Site) -> TinyModel:
    python = python_with("transformers", "torch")
    if python is None:
        pytest.skip("transformers is not installed")
    user = HubUser(site.hub.url, site.users / "models", python=python)
    place = user.home / "tiny"
    files = {path: (place / path).read_bytes() for path in user.call("make_model", place=str(place))}
    return TinyModel(python, files, user.call("model", repo_id=site.new(files).repo_id))


def test_model__is_loaded_by_name(site: Site, tiny: TinyModel, is_xet: bool) -> None:
    repository = site.new(tiny.files, is_xet=True)
    user = HubUser(site.gateways[NODES[0]], site.users / f"models-{is_xet}", is_xet=is_xet, python=tiny.python)

    loaded = user.call("model", repo_id=repository.repo_id)

    assert loaded == tiny.loaded
    assert (loaded["kind"], loaded["tokens"]) == ("bert", [2, 5, 6, 3])


# --- requests ---


@dataclass(frozen=True)
class Ask:
    """One request of a client that speaks HTTP itself; ``{id}`` and ``{sha}`` are the repository's."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, Any] | None = None

    def send(self, endpoint: str, repository: HubRepository, token: str | None = None) -> "Reply":
        sha = repository.refs["refs/heads/main"]
        kinds = {"api": f"{repository.kind}s", "kind": "" if repository.kind == "model" else f"{repository.kind}s/"}
        url = endpoint + self.path.format(id=repository.repo_id, sha=sha, **kinds)
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        deadline = time.monotonic() + LONGEST_SECONDS
        while True:
            with client() as http:
                response = http.request(self.method, url, headers={**self.headers, **bearer}, data=self.form)
            if response.status_code != 429 or time.monotonic() > deadline:
                return Reply.of(self.method, response, endpoint)
            time.sleep(float(response.headers["Retry-After"]))  # as the hub's client does


def client() -> httpx2.Client:
    return httpx2.Client(trust_env=False, verify=False, follow_redirects=True, timeout=LONGEST_SECONDS)


@dataclass(frozen=True)
class Reply:
    """What a client sees of an answer and of the redirects before it."""

    status: int
    commit: str | None
    etag: str | None
    size: str | None
    length: str | None
    content_range: str | None
    accept_ranges: str | None
    code: str | None
    message: str | None = field(compare=False)
    next_page: str | None
    body: object = field(compare=False)
    headers: Mapping[str, str] = field(compare=False)

    @classmethod
    def of(cls, method: str, response: httpx2.Response, endpoint: str) -> "Reply":
        hops = [*response.history, response]

        def first(*names: str) -> str | None:
            return next((hop.headers[name] for hop in hops for name in names if name in hop.headers), None)

        is_file = "/resolve/" in hops[0].url.path and response.is_success
        is_json = response.headers.get("Content-Type", "").startswith("application/json")
        link = response.headers.get("Link", "")
        return cls(
            status=response.status_code,
            commit=first("X-Repo-Commit") if "/resolve/" in hops[0].url.path else None,
            etag=(first("X-Linked-Etag") or first("ETag") or "").strip('"') if is_file else None,
            size=(first("X-Linked-Size") or response.headers["Content-Length"])
            if is_file and method == "HEAD"
            else None,
            length=response.headers.get("Content-Length") if is_file else None,
            content_range=response.headers.get("Content-Range"),
            accept_ranges=first("Accept-Ranges") if is_file else None,
            code=first("X-Error-Code"),
            message=first("X-Error-Message"),
            next_page=link.replace(endpoint, "") if "next" in link else None,
            body=json.loads(response.content) if is_json and method != "HEAD" and not is_file else response.content,
            headers={name: value for hop in hops for name, value in hop.headers.items()},
        )

    @property
    def plain(self) -> object:
        """The body without what a gateway leaves out, in an order that does not matter."""
        body = forwarded(self.body)
        return sorted(body, key=repr) if isinstance(body, list) else body


def forwarded(value: Any) -> Any:
    """Without xet, and without git's names of folders, which a mirror does not hold and no client reads."""
    if isinstance(value, dict):
        is_folder = value.get("type") == "directory"
        left_out = {name for name in value if "xet" in name.lower()} | ({"oid"} if is_folder else set())
        return {name: forwarded(one) for name, one in value.items() if name not in left_out}
    return [forwarded(one) for one in value] if isinstance(value, list) else value


def xet_of(reply: Reply) -> list[str]:
    """Every header and field of xet in an answer."""
    said = {**reply.headers, **({} if isinstance(reply.body, bytes) else {"body": json.dumps(reply.body)})}
    return [f"{name}: {value}" for name, value in said.items() if "xet" in f"{name} {value}".lower()]


def ranged(value: str, path: str = LARGE) -> Ask:
    return Ask("GET", f"/{{kind}}{{id}}/resolve/main/{path}", {"Range": value})


GZIP: Final = {"Accept-Encoding": "gzip, deflate, br, zstd"}
FILE_ASKS: Final[Mapping[str, Ask]] = {
    "HEAD of LFS": Ask("HEAD", "/{kind}{id}/resolve/main/model.safetensors"),
    "HEAD of LFS, identity": Ask("HEAD", "/{kind}{id}/resolve/main/model.safetensors", {"Accept-Encoding": "identity"}),
    "HEAD by commit": Ask("HEAD", "/{kind}{id}/resolve/{sha}/small.bin"),
    "HEAD of git": Ask("HEAD", "/{kind}{id}/resolve/main/config.json"),
    "HEAD of 0 bytes": Ask("HEAD", "/{kind}{id}/resolve/main/nested/empty.txt"),
    "HEAD of nothing": Ask("HEAD", "/{kind}{id}/resolve/main/none"),
    "HEAD at no revision": Ask("HEAD", "/{kind}{id}/resolve/none/config.json"),
    "GET of LFS": Ask("GET", "/{kind}{id}/resolve/main/model.safetensors", GZIP),
    "GET of git": Ask("GET", "/{kind}{id}/resolve/main/config.json", GZIP),
    "GET of git, to be kept": Ask("GET", "/{kind}{id}/resolve/main/config.json?download=true"),
    "GET of a quoted name": Ask("GET", "/{kind}{id}/resolve/main/nested/deeper/tok%2Ben%20izer%25.json"),
    "GET of 0 bytes": Ask("GET", "/{kind}{id}/resolve/main/nested/empty.txt"),
    "GET of a pull request": Ask("GET", "/{kind}{id}/resolve/refs%2Fpr%2F1/README.md"),
    "GET of nothing": Ask("GET", "/{kind}{id}/resolve/main/none"),
    "GET of a folder": Ask("GET", "/{kind}{id}/resolve/main/nested"),
    "first byte": ranged("bytes=0-0"),
    "first byte of git": ranged("bytes=0-0", "config.json"),
    "middle": ranged(f"bytes={8 * MIB - 3}-{8 * MIB + 3}"),
    "suffix": ranged("bytes=-5"),
    "from there on": ranged(f"bytes={9 * MIB}-"),
    "longer than the file": ranged("bytes=5-999", "config.json"),
    "behind the end": ranged(f"bytes={20 * MIB}-"),
    "range of 0 bytes": ranged("bytes=0-0", "nested/empty.txt"),
    "no range": ranged("lines=1-2", "config.json"),
}
API_ASKS: Final[Mapping[str, Ask]] = {
    "tree": Ask("GET", "/api/{api}/{id}/tree/main?recursive=true&expand=false", GZIP),
    "tree, top": Ask("GET", "/api/{api}/{id}/tree/{sha}"),
    "tree, folder": Ask("GET", "/api/{api}/{id}/tree/main/nested/deeper?recursive=false"),
    "tree, no folder": Ask("GET", "/api/{api}/{id}/tree/main/additional_chat_templates?recursive=false&expand=false"),
    "tree, no revision": Ask("GET", "/api/{api}/{id}/tree/none"),
    "tree, pull request": Ask("GET", "/api/{api}/{id}/tree/refs%2Fpr%2F1?recursive=true"),
    "paths": Ask(
        "POST", "/api/{api}/{id}/paths-info/main", {}, {"paths": [*FILES, "nested", "none"], "expand": "false"}
    ),
    "paths, one": Ask("POST", "/api/{api}/{id}/paths-info/{sha}", {}, {"paths": LARGE}),
    "paths, no revision": Ask("POST", "/api/{api}/{id}/paths-info/none", {}, {"paths": LARGE}),
    "refs": Ask("GET", "/api/{api}/{id}/refs?include_prs=1"),
    "commits": Ask("GET", "/api/{api}/{id}/commits/main"),
    "discussions": Ask("GET", "/api/{api}/{id}/discussions?p=0"),
    "access": Ask("GET", "/api/{api}/{id}/auth-check"),
    "no revision": Ask("GET", "/api/{api}/{id}/revision/none"),
    "no repository": Ask("GET", "/api/{api}/org/none"),
    "no repository's tree": Ask("GET", "/api/{api}/org/none/tree/main"),
    "no repository's file": Ask("HEAD", "/{kind}org/none/resolve/main/config.json"),
}
INFO_ASKS: Final[Mapping[str, Ask]] = {
    "info": Ask("GET", "/api/{api}/{id}", GZIP),
    "info at a revision": Ask("GET", "/api/{api}/{id}/revision/main?blobs=true&securityStatus=true&unknown=1"),
    "info, part": Ask("GET", "/api/{api}/{id}?expand=sha&expand=gated"),
}
ASKS: Final[Mapping[str, Ask]] = {**FILE_ASKS, **API_ASKS, **INFO_ASKS}


@pytest.fixture(scope="module")
def plain(site: Site) -> HubRepository:
    return requested(site.new(is_xet=True))


@pytest.fixture(scope="module")
def dataset(site: Site) -> HubRepository:
    return requested(site.new(kind="dataset"))


def requested(repository: HubRepository) -> HubRepository:
    repository.commit({"README.md": b"# proposed\n"}, branch="refs/pr/1")
    return repository


@pytest.mark.parametrize("fixture", ["plain", "dataset"])
@pytest.mark.parametrize("name", ASKS)
def test_request__through_the_gateway__is_answered_as_by_the_hub_without_xet_and_gzip(
    request: pytest.FixtureRequest, site: Site, fixture: str, name: str
) -> None:
    repository: HubRepository = request.getfixturevalue(fixture)
    direct = ASKS[name].send(site.hub.url, repository)
    if name in INFO_ASKS:
        direct = stated(direct)

    through = ASKS[name].send(site.gateways[NODES[0]], repository)
    again = ASKS[name].send(site.gateways[NODES[1]], repository)

    for reply in (through, again):
        assert xet_of(reply) == []
        assert "content-encoding" not in reply.headers
        found = stated(reply) if name in INFO_ASKS else reply
        assert found == direct
        assert found.plain == direct.plain or direct.status == 416  # the hub says nothing there
        assert direct.message in {None, reply.message}


def stated(reply: Reply) -> Reply:
    """A description, by what clients rely on."""
    body = reply.body
    assert isinstance(body, dict)
    named = {name: body[name] for name in (*STATED, "siblings") if name in body}
    return Reply(**{**{name: getattr(reply, name) for name in reply.__dataclass_fields__}, "body": named})


@pytest.mark.parametrize("name", ["tree", "paths"])
def test_expanded_entries__may_lack_what_the_hub_alone_knows(site: Site, plain: HubRepository, name: str) -> None:
    asks = {
        "tree": Ask("GET", "/api/{api}/{id}/tree/main?recursive=true&expand=true"),
        "paths": Ask("POST", "/api/{api}/{id}/paths-info/main", {}, {"paths": [LARGE, "nested"], "expand": "true"}),
    }

    direct, through = (asks[name].send(url, plain) for url in (site.hub.url, site.gateways[NODES[0]]))

    assert (through.status, xet_of(through)) == (200, [])
    assert entries(through) == entries(direct)


def entries(reply: Reply) -> dict[str, Json]:
    assert isinstance(reply.body, list)
    known = ("type", "path", "size", "oid", "lfs")
    shown = {entry["path"]: {name: entry[name] for name in known if name in entry} for entry in reply.body}
    return {path: forwarded(entry) for path, entry in shown.items()}


def test_listing_of_many_files__comes_in_pages_that_lead_through_the_gateway(site: Site) -> None:
    repository = site.new({f"part-{number:05}.txt": b"" for number in range(1203)})
    gateway = site.gateways[NODES[0]]
    pages, address = [], f"{gateway}/api/models/{repository.repo_id}/tree/main?recursive=true"

    with client() as http:
        while address:
            page = http.get(address).raise_for_status()
            pages.append(page.json())
            address = page.links.get("next", {}).get("url", "")
            assert not address or address.startswith(gateway)
    [whole] = site.user(gateway).run([("api", {"method": "list_repo_files", "repo_id": repository.repo_id})])

    paths = [entry["path"] for page in pages for entry in page]
    assert paths == sorted(whole) == sorted(repository.commits[repository.refs["refs/heads/main"]].files)


def test_file_that_plain_http_may_not_carry__is_at_another_port_without_its_size(site: Site) -> None:
    """The hub's client refuses more than 50 GB by plain HTTP, if it knows the size."""
    repository = site.new({"config.json": b"{}"})
    repository.commit({LARGE: GeneratedContent(51 * 1000**3).declaring("a" * 64)})
    url = f"{site.gateways[NODES[0]]}/{repository.repo_id}/resolve/main/"

    with client() as http:
        large, small = (http.head(url + path, follow_redirects=False) for path in (LARGE, "config.json"))
        again = http.head(large.headers["Location"], follow_redirects=False)

    assert (large.status_code, small.status_code) == (302, 200)
    assert (large.headers["ETag"], large.headers["X-Repo-Commit"]) == (
        f'"{"a" * 64}"',
        repository.refs["refs/heads/main"],
    )
    assert {"content-length", "x-linked-size"} & large.headers.keys() == set()
    assert urlsplit(large.headers["Location"]).hostname == "127.0.0.1"
    assert (again.status_code, again.headers["Content-Length"]) == (200, str(51 * 1000**3))


def test_xet_token__is_what_the_hub_gives(site: Site, plain: HubRepository) -> None:
    """A client whose listing was written by the hub itself has no other way to its files."""
    ask = Ask("GET", "/api/{api}/{id}/xet-read-token/{sha}")

    direct, through = (ask.send(url, plain) for url in (site.hub.url, site.gateways[NODES[0]]))

    assert (through.status, through.headers.get("x-xet-cas-url")) == (200, direct.headers["x-xet-cas-url"])


def test_account__is_what_the_hub_says_of_the_token(site: Site) -> None:
    ask, repository, token = Ask("GET", "/api/whoami-v2"), site.new(), site.hub.user("carol")

    for caller in (token, None, "hf_wrong"):
        direct, through = (ask.send(url, repository, caller) for url in (site.hub.url, site.gateways[NODES[0]]))
        assert (through, through.plain) == (direct, direct.plain)


@pytest.mark.parametrize("path", ["/api/agent-harnesses", "/api/telemetry/transformers", "/parquet", "/info"])
def test_request_that_no_download_needs__is_answered_without_the_hub(site: Site, path: str) -> None:
    with client() as http:
        status = http.get(site.gateways[NODES[0]] + path).status_code

    assert status in {200, 204, 404}
    assert site.hub.log.count() == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/models/{id}/commit/main"), ("POST", "/api/models/{id}/preupload/main"),
        ("DELETE", "/api/repos/delete"), ("PUT", "/{id}/resolve/main/config.json"),
        ("POST", "/api/repos/create"), ("GET", "/api/models/{id}/xet-write-token/main"),
        ("POST", "/{id}.git/info/lfs/objects/batch"), ("POST", "/api/models/{id}/tag/main"),
    ],
)  # fmt: skip
def test_request_that_writes__is_refused_and_never_reaches_the_hub(site: Site, method: str, path: str) -> None:
    repository = site.new()

    with client() as http:
        answered = http.request(method, site.gateways[NODES[0]] + path.format(id=repository.repo_id), json={})

    assert answered.status_code in {403, 404, 405, 501}
    assert site.hub.log.count() == 0


# --- the hub's bytes ---


def test_second_node__gets_nothing_from_the_hub(site: Site) -> None:
    repository = site.new()
    options = {"repo_id": repository.repo_id}
    first, second = (site.user(site.gateways[node]) for node in NODES)

    one = first.call("snapshot", **options)
    assert site.content_bytes == sum(map(len, FILES.values()))
    site.hub.log.clear()
    two = second.call("snapshot", **options)
    three = site.user(site.gateways[NODES[0]]).call("snapshot", **options, revision=one["commit"])

    assert one == two == three
    assert (one["files"], site.content_bytes) == (DIGESTS, 0)


def test_many_askers_of_a_new_repository__get_each_byte_from_the_hub_once(site: Site) -> None:
    repository = site.new()
    ask = {path: Ask("GET", f"/{{id}}/resolve/main/{path.replace('%', '%25')}") for path in FILES}
    wanted = [(path, site.gateways[NODES[number % 2]]) for number in range(ASKERS) for path in (LARGE, "config.json")]
    wanted += [(path, site.gateways[NODES[0]]) for path in FILES]

    with ThreadPoolExecutor(len(wanted)) as threads:
        replies = list(threads.map(lambda one: (one[0], ask[one[0]].send(one[1], repository)), wanted))

    assert [(path, reply.status, reply.message) for path, reply in replies if reply.status != 200] == []
    assert {path: reply.body for path, reply in replies} == FILES
    assert all(reply.body == FILES[path] for path, reply in replies)
    assert site.content_bytes == sum(map(len, FILES.values()))


@pytest.mark.parametrize("path", [LARGE, "small.bin", "config.json"])
def test_wrong_byte_from_the_hub__is_never_completed(site: Site, path: str) -> None:
    repository = site.new()
    sha = repository.refs["refs/heads/main"]
    digest = repository.commits[sha].files[path].sha256
    site.hub.fail(flip_byte(at=10), f"{digest}|{sha}/{path}", times=None)
    whole, part = Ask("GET", f"/{{id}}/resolve/main/{path}"), ranged("bytes=10-12", path)

    for ask in (whole, part):
        for url in site.gateways.values():
            with suppress(httpx2.RemoteProtocolError, httpx2.ReadError):
                reply = ask.send(url, repository)
                assert reply.status >= 500, reply
    assert site.content_bytes > 0
    site.hub.script.clear()

    def repaired() -> bool:
        """A copy that failed is repeated after a while."""
        reply = whole.send(site.gateways[NODES[0]], repository)
        assert reply.status >= 500 or reply.body == FILES[path], reply
        return reply.status == 200

    wait_until(repaired, what="the right bytes")


# --- the hub is down ---

OUTAGES: Final[Mapping[str, Fault]] = {
    "closes connections": drop(),
    "answers 503": answer(503),
}


@pytest.fixture(params=OUTAGES)
def outage(request: pytest.FixtureRequest) -> Fault:
    return OUTAGES[request.param]


def test_hub_that_is_down__is_not_needed_for_what_is_held(site: Site, outage: Fault) -> None:
    repository = site.new()
    repository.tag("v1")
    for revision in ("main", "v1"):
        site.user(site.gateways[NODES[0]]).call("snapshot", repo_id=repository.repo_id, revision=revision)
    site.hub.fail(outage, times=None)
    sha = repository.refs["refs/heads/main"]
    options = {"repo_id": repository.repo_id}
    calls: list[Call] = [
        ("snapshot", options),
        ("snapshot", {**options, "revision": "v1"}),
        ("snapshot", {**options, "revision": sha}),
        ("snapshot", {**options, "allow_patterns": ["nested/*"]}),
        ("command", {"arguments": ["download", repository.repo_id]}),
        ("file", {**options, "filename": LARGE}),
        ("file_system", {"place": repository.repo_id, "path": LARGE}),
        ("safetensors", options),
        ("remembered_absence", {**options, "filename": "none"}),
        ("api", {"method": "list_repo_refs", **options}),
    ]

    for node in NODES:
        main, tag, commit, part, command, file, files, weights, absent, refs = site.user(site.gateways[node]).run(calls)
        assert main == tag == commit == {"commit": sha, "files": DIGESTS}
        assert command == {"code": 0, **main}
        assert part["files"] == {path: digest for path, digest in DIGESTS.items() if path.startswith("nested/")}
        assert (file["sha256"], files["read"][0]) == (DIGESTS[LARGE], DIGESTS[LARGE])
        assert weights["sharded"] is False
        assert absent == {
            "class": "RemoteEntryNotFoundError",
            "absent": [f"models--{repository.repo_id.replace('/', '--')}/.no_exist/{sha}/none"],
        }
        assert [(one["name"], one["target_commit"]) for one in refs["branches"]] == [("main", sha)]


def test_hub_that_is_down__is_504_for_what_is_not_held(site: Site, outage: Fault) -> None:
    part, unknown = site.new(), site.new()
    site.user(site.gateways[NODES[0]]).call("file", repo_id=part.repo_id, filename="config.json")
    site.hub.fail(outage, times=None)
    asks = [
        (part, Ask("GET", "/{id}/resolve/main/model.safetensors")),
        (part, Ask("GET", "/{id}/resolve/{sha}/small.bin")),
        (part, Ask("GET", "/api/models/{id}/revision/other")),
        *((unknown, ASKS[name]) for name in ("info", "tree", "HEAD of git", "GET of git", "HEAD by commit", "paths")),
    ]

    replies = [ask.send(url, repository) for url in site.gateways.values() for repository, ask in asks]
    said = site.user(site.gateways[NODES[0]]).call("api", method="model_info", repo_id=unknown.repo_id)

    assert [reply.status for reply in replies] == [504] * len(replies)
    assert all(reply.message for reply in replies)
    assert (said["error"], said["status"]) == ("HfHubHTTPError", 504)


def test_hub_that_is_silent__makes_no_client_wait_until_it_gives_up(site: Site) -> None:
    """The client waits 10 s for the answer to a HEAD, and each file has one."""
    repository, unknown = site.new(), site.new()
    options = {"repo_id": repository.repo_id}
    site.user(site.gateways[NODES[0]]).call("snapshot", **options)
    site.hub.fail(hang(), times=None)

    files = [("file", {**options, "filename": path}) for path in ("config.json", LARGE, "nested/empty.txt")]
    found = site.user(site.gateways[NODES[1]], token=site.hub.user("carol")).run(files)
    refused = ASKS["HEAD of git"].send(site.gateways[NODES[0]], unknown)

    assert [one.get("sha256") for one in found] == [DIGESTS[str(options["filename"])] for _, options in files], found
    assert refused.status == 504


def test_hub_that_is_down__is_named_in_a_warning_and_used_again_when_it_is_back(site: Site) -> None:
    repository, later, caller = site.new(), site.new(), site.hub.user("carol")
    tree, gateway = ASKS["tree"], site.gateways[NODES[0]]
    site.user(gateway).call("snapshot", repo_id=repository.repo_id)
    site.hub.fail(drop(), times=None)

    for name in ("info", "tree", "paths", "HEAD of git", "GET of LFS", "first byte"):
        reply = ASKS[name].send(gateway, repository, caller)  # what the hub said to another token does not count
        assert (reply.status in {200, 206}, reply.headers.get("x-hf-warning", "")[:4]) == (True, "bdn;"), name
    assert tree.send(gateway, later).status == 504
    site.hub.script.clear()

    wait_until(lambda: tree.send(gateway, later).status == 200, what="the hub")


# --- access ---

CALLERS: Final = ("owner", "allowed", "stranger", "anonymous", "wrong")
WHAT: Final = ("public", "private", "gated")
NEEDED: Final = ("info", "tree", "paths", "HEAD of LFS", "HEAD of git", "GET of git", "first byte", "access", "refs")


@dataclass(frozen=True)
class Callers:
    tokens: Mapping[str, str | None]
    late: str  # of a caller with access that is never used while the hub is up


@pytest.fixture(scope="module")
def callers(site: Site) -> Callers:
    named = {name: site.hub.user(name) for name in ("allowed", "stranger")}
    return Callers(
        {"owner": site.hub.token, **named, "anonymous": None, "wrong": "hf_wrongwrong"}, site.hub.user("late")
    )


def granted(site: Site, callers: Callers, what: str) -> HubRepository:
    repository = site.new(private=what == "private", gated=what == "gated")
    for token in (callers.tokens["allowed"], callers.late):
        repository.allow(str(token))
    return repository


@pytest.mark.parametrize("what", WHAT)
def test_access__of_each_caller__is_what_the_hub_gives_also_once_others_were_served(
    site: Site, callers: Callers, what: str
) -> None:
    repository = granted(site, callers, what)
    order = (*CALLERS, *CALLERS[::-1])

    for caller in order:
        for name in NEEDED:
            ask, token = ASKS[name], callers.tokens[caller]
            direct = ask.send(site.hub.url, repository, token)
            for node, url in site.gateways.items():
                through = ask.send(url, repository, token)
                found = (through.status, through.code, through.commit, through.etag)
                expected = (direct.status, direct.code, direct.commit, direct.etag)
                assert found == expected, (node, caller, name)
                if direct.status != 200:
                    assert through.plain == direct.plain, (node, caller, name)


@pytest.mark.parametrize("what", WHAT)
def test_access__while_the_hub_is_down__is_to_public_repositories_alone(
    site: Site, callers: Callers, what: str
) -> None:
    repository = granted(site, callers, what)
    for caller in ("owner", "allowed"):
        site.user(site.gateways[NODES[0]], token=callers.tokens[caller]).call("snapshot", repo_id=repository.repo_id)
    site.hub.fail(drop(), times=None)
    refused = {None: {401, 504}, callers.tokens["wrong"]: {401, 504}}
    asks = [ASKS[name] for name in ("HEAD of LFS", "GET of git", "first byte", "tree", "info")]

    for token in (callers.late, callers.tokens["stranger"], *refused):
        for url in site.gateways.values():
            statuses = {ask.send(url, repository, token).status for ask in asks}
            if what == "public":
                assert statuses == {200, 206}, token
            else:
                assert statuses == {504}, token


def test_tokens__are_in_no_file_row_log_and_answer(site: Site, callers: Callers) -> None:
    repository = granted(site, callers, "gated")
    tokens = [str(token) for token in (*callers.tokens.values(), callers.late) if token]
    replies = [
        ASKS[name].send(url, repository, token)
        for token in tokens
        for url in site.gateways.values()
        for name in (*NEEDED, "no repository", "GET of nothing")
    ]
    site.hub.fail(answer(500), times=None)
    replies += [ASKS["GET of git"].send(url, site.new(), token) for token in tokens for url in site.gateways.values()]
    with site.cluster.http() as http:
        replies_of_mirror = [http.get(path).text for path in ("/metrics", "/mirrors", "/events", "/agents")]

    rows = behind(site.cluster.root / "mirror/data").rows()
    places = {str(path): path.read_bytes() for path in site.cluster.root.rglob("*") if is_text(path)}
    places |= {"rows": repr(rows).encode(), "mirror": "".join(replies_of_mirror).encode()}
    places |= {f"reply {number}": repr((reply.headers, reply.body)).encode() for number, reply in enumerate(replies)}
    assert len(places) > len(replies) + 6
    assert [(name, token) for name, found in places.items() for token in tokens if token.encode() in found] == []


def is_text(path: Path) -> bool:
    """Any file but those of content, which are large."""
    return path.is_file() and "chunks" not in path.parts and path.stat().st_size < 64 * MIB
