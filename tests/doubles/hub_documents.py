"""JSON documents of the hub double's API about references, commits, discussions and callers.

Their fields were read from ``huggingface_hub`` 2.4.0, which parses them.
"""

from collections.abc import Mapping

from tests.doubles.hub_repository import COMMITTED_AT, Commit, HubRepository, Json

_PULL_REQUESTS = "refs/pr/"
_REFS = {"branches": "refs/heads/", "tags": "refs/tags/", "converts": "refs/convert/"}


def refs(repository: HubRepository, query: Mapping[str, list[str]]) -> dict[str, Json]:
    """``/refs``; pull requests only where ``include_prs`` asks for them."""
    prefixes = _REFS | ({"pullRequests": _PULL_REQUESTS} if "include_prs" in query else {})
    return {
        field: [
            {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": sha}
            for ref, sha in repository.refs.items()
            if ref.startswith(prefix)
        ]
        for field, prefix in prefixes.items()
    }


def commit_entry(commit: Commit) -> dict[str, Json]:
    return {**commit.brief, "message": "", "authors": [{"user": "owner", "avatar": "/avatars/owner.svg"}]}


def expanded(commit: Commit, entry: Mapping[str, Json]) -> dict[str, Json]:
    """An entry of a tree with what ``expand=True`` adds: the last commit and, of a file, what scanners said."""
    scan = {"status": "safe", "avScan": {"virusFound": False, "virusNames": None}, "pickleImportScan": None}
    security = {"securityFileStatus": scan} if entry["type"] == "file" else {}
    return {**entry, "lastCommit": commit.last_change(str(entry["path"])).brief, **security}


def discussions(repository: HubRepository) -> dict[str, Json]:
    """One open pull request for each ``refs/pr/<number>``."""
    numbers = sorted(int(ref.removeprefix(_PULL_REQUESTS)) for ref in repository.refs if ref.startswith(_PULL_REQUESTS))
    entries: list[Json] = [
        {
            "num": number,
            "title": f"Pull request {number}",
            "author": {"name": "owner", "type": "user"},
            "createdAt": COMMITTED_AT,
            "status": "open",
            "repo": {"name": repository.repo_id, "type": repository.kind},
            "isPullRequest": True,
        }
        for number in numbers
    ]
    return {"discussions": entries, "count": len(entries), "start": 0, "numClosedDiscussions": 0}


def whoami(name: str) -> dict[str, Json]:
    return {
        "type": "user",
        "id": "6512bd43d9caa6e02c990b0b",
        "name": name,
        "fullname": name.title(),
        "isPro": False,
        "orgs": [],
        "auth": {"type": "access_token", "accessToken": {"displayName": "test", "role": "read"}},
    }
