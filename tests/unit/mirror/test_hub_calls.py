"""What an address of the hub asks about: repository, operation, revision and path."""

import pytest

from bdn.core.source.uri import REPO_KINDS, RepoKind
from bdn.mirror.hub.calls import HubCall

SHA = "0123456789" * 4


@pytest.mark.parametrize(("folder", "kind"), [("models", "model"), *REPO_KINDS.items()])
@pytest.mark.parametrize("repo_id", ["org/name", "name"])
def test_each_kind_of_repository__with_and_without_a_namespace(folder: str, kind: RepoKind, repo_id: str) -> None:
    api, files = f"/api/{folder}/{repo_id}", repo_id if kind == "model" else f"{folder}/{repo_id}"
    calls = {
        api: HubCall(kind, repo_id, ""),
        f"{api}/revision/v1": HubCall(kind, repo_id, "revision", "v1"),
        f"{api}/tree/v1": HubCall(kind, repo_id, "tree", "v1"),
        f"{api}/tree/v1/a/b": HubCall(kind, repo_id, "tree", "v1", "a/b"),
        f"{api}/paths-info/{SHA}": HubCall(kind, repo_id, "paths-info", SHA),
        f"{api}/refs": HubCall(kind, repo_id, "refs"),
        f"{api}/commits/v1": HubCall(kind, repo_id, "commits", "v1"),
        f"{api}/discussions": HubCall(kind, repo_id, "discussions"),
        f"{api}/xet-read-token/{SHA}": HubCall(kind, repo_id, "xet-read-token", SHA),
        f"{api}/auth-check": HubCall(kind, repo_id, "auth-check"),
        f"/{files}/resolve/v1/a/b.bin": HubCall(kind, repo_id, "resolve", "v1", "a/b.bin"),
    }

    assert {path: HubCall.of(path) for path in calls} == calls
    assert {HubCall.of(path).api for path in calls if HubCall.of(path)} == {api}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("path", "revision", "inside"),
    [
        ("/api/models/org/name/revision/refs%2Fpr%2F1", "refs/pr/1", ""),
        ("/api/models/org/name/tree/refs%2Fpr%2F1/a%20b/c", "refs/pr/1", "a b/c"),
        ("/org/name/resolve/refs%2Fpr%2F1/a/b", "refs/pr/1", "a/b"),
        ("/org/name/resolve/main/%5Bx%5D%3F%2A%25.txt", "main", "[x]?*%.txt"),
        ("/org/name/resolve/main/%E6%97%A5%E6%9C%AC.json", "main", "日本.json"),
        ("/org/name/resolve/main/a%2Fb", "main", "a/b"),
    ],
)
def test_a_quoted_revision_is_one_segment(path: str, revision: str, inside: str) -> None:
    call = HubCall.of(path)

    assert call is not None
    assert (call.repo_id, call.revision, call.path) == ("org/name", revision, inside)


@pytest.mark.parametrize(
    ("path", "repo_id", "operation", "revision", "inside"),
    [
        ("/api/models/org/name/tree/tree/refs/tree", "org/name", "tree", "tree", "refs/tree"),
        ("/api/models/name/tree/refs", "name", "tree", "refs", ""),
        ("/api/models/refs/name/refs", "refs/name", "refs", "main", ""),
        ("/api/models/tree", "tree", "", "main", ""),
        ("/api/models/models/datasets", "models/datasets", "", "main", ""),
        ("/org/name/resolve/resolve/resolve", "org/name", "resolve", "resolve", "resolve"),
        ("/org/name/resolve/main/resolve/main/x", "org/name", "resolve", "main", "resolve/main/x"),
        ("/name/resolve/resolve/x", "name", "resolve", "resolve", "x"),
        ("/resolve/name/resolve/main/x", "resolve/name", "resolve", "main", "x"),
    ],
)
def test_names_that_look_like_operations(path: str, repo_id: str, operation: str, revision: str, inside: str) -> None:
    assert HubCall.of(path) == HubCall("model", repo_id, operation, revision, inside)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/api",
        "/api/",
        "/api/models",
        "/api/models/",
        "/api/models//name/refs",
        "/api/models/org//refs",
        "//resolve/main/x",
        "/org//resolve/main/x",
        "/org/name/resolve//x",
        "/org/name/resolve/main/",
        "/org/name/resolve/main/../../x",
        "/api/models/org/name/tree/main/../../../../other/name",
        "/api/models/org/name/tree/main/%2E%2E/x",
        "/api/models/org/name/tree/main%2F..%2F..%2Fx",
        "/api/models/org/name/tree/main/./x",
        "/api/models/org/name/nonsense",
        "/api/models/org/name/resolve/main/x",
        "/api/models/org/name/../other/refs",
        "/api/buckets/org/name/tree",
        "/api/whoami-v2",
        "/api/agent-harnesses",
        "/org",
        "/org/name",
        "/org/name/blob/main/x",
        "/org/name/resolve",
        "/org/name/resolve/main",
        "/resolve/main/x",
        "/datasets/resolve/main/x",
        "/a/b/c/resolve/main/x",
        "/datasets/a/b/c/resolve/main/x",
    ],
)
def test_an_address_about_no_repository(path: str) -> None:
    assert HubCall.of(path) is None


@pytest.mark.parametrize(
    ("old", "target", "new"),
    [
        ("gpt2", "/gpt2/resolve/main/gpt2/x", "/org/gpt2/resolve/main/gpt2/x"),
        ("gpt2", "/api/models/gpt2/tree/main?recursive=true", "/api/models/org/gpt2/tree/main?recursive=true"),
        ("a/b", "/datasets/a/b/resolve/refs%2Fpr%2F1/x", "/datasets/org/gpt2/resolve/refs%2Fpr%2F1/x"),
    ],
)
def test_a_target_of_a_renamed_repository_keeps_all_but_the_name(old: str, target: str, new: str) -> None:
    assert HubCall("model", old, "resolve").moved(target, HubCall("model", "org/gpt2", "")) == new
