"""A job's weights request: sources, patterns, mount locations and credentials.

Patterns are globs over the path relative to the source, see docs/patterns.md. Messages follow ``truss`` where it has
one, so that users of both read the same words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from posixpath import commonprefix
from typing import ClassVar, Final, Literal, get_args

from bdn.core.errors import InvalidMountError, InvalidRequestError, InvalidSourceError
from bdn.core.units import counted

COMMIT: Final = re.compile(r"[0-9a-f]{40}")  # of git
LENGTH_LIMIT: Final = 4096  # characters; no path is longer, and a pattern of a megabyte takes a minute to compile
COUNT_LIMIT: Final = 1000
MOST_PREFIXES: Final = 16  # each may cost one more request to the source
_WITHIN: Final = "[^/]*?"
_FOLDERS: Final = "(?:[^/]+/)*?"
_ACROSS: Final = ".*?"
_BELOW: Final = ".+"


@dataclass(frozen=True, slots=True)
class Patterns:
    """Empty ``allow`` means everything; empty ``ignore`` means nothing."""

    allow: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.allow) + len(self.ignore)
        if count > COUNT_LIMIT:
            raise InvalidRequestError(
                f"{count} patterns are too many for one source; the limit is {COUNT_LIMIT}; use globs, or several sources"
            )
        for pattern in (*self.allow, *self.ignore):
            if not pattern or pattern.startswith("/") or "\0" in pattern:
                raise InvalidRequestError(
                    f"pattern {pattern!r} is empty, absolute or holds a NUL; patterns are relative to the source"
                )
            if len(pattern) > LENGTH_LIMIT:
                raise InvalidRequestError(
                    f"pattern {pattern[:80]!r}… has {len(pattern)} characters; the limit is {LENGTH_LIMIT}"
                )


EVERYTHING: Final = Patterns()


@dataclass(frozen=True, slots=True)
class SelectedPaths:
    """Selected paths in the given order, and a warning for each pattern that matched nothing."""

    paths: tuple[str, ...]
    warnings: tuple[str, ...]


def select(paths: Sequence[str], patterns: Patterns) -> SelectedPaths:
    """Apply the patterns to normalised paths. The caller decides whether an empty selection is an error."""
    allow = [(pattern, compile_pattern(pattern)) for pattern in patterns.allow]
    ignore = [(pattern, compile_pattern(pattern)) for pattern in patterns.ignore]
    unmatched = {pattern for pattern, _ in (*allow, *ignore)}
    # Only patterns that narrow no listing: the warnings must not depend on how a source is listed.
    deeper = {one: compile_pattern(f"**/{one}") for one, _ in allow if not literal_start(one) and one[:2] != "**"}
    below: dict[str, list[str]] = {pattern: [] for pattern in deeper}
    chosen: list[str] = []
    for path in paths:
        allowed_by = [pattern for pattern, glob in allow if glob.fullmatch(path)]
        ignored_by = [pattern for pattern, glob in ignore if glob.fullmatch(path)]
        unmatched.difference_update(allowed_by, ignored_by)
        if (allowed_by or not allow) and not ignored_by:
            chosen.append(path)
        elif not ignored_by and "/" in path:
            for pattern, glob in deeper.items():
                if glob.fullmatch(path):
                    below[pattern].append(path)
    warnings = [
        f"{field} {pattern!r} matched no file{hint_for(pattern, paths)}"
        for field, given in (("allow_patterns", patterns.allow), ("ignore_patterns", patterns.ignore))
        for pattern in dict.fromkeys(given)
        if pattern in unmatched
    ]
    warnings += [
        f"allow_patterns {pattern!r} leaves out {counted(len(found), 'file')} in folders, such as {found[0]!r}: '*' does not cross "
        f"'/' here; write {f'**/{pattern}'!r} to have them"
        for pattern, found in below.items()
        if found and pattern not in unmatched
    ]
    return SelectedPaths(tuple(chosen), tuple(warnings))


def hint_for(pattern: str, paths: Sequence[str]) -> str:
    """``; …`` with the ``**/`` form where it would have matched, otherwise ""."""
    deeper = f"**/{pattern.removeprefix('./')}"
    glob = compile_pattern(deeper)
    if any(glob.fullmatch(path) for path in paths):
        return f"; {deeper!r} would have matched: '*' does not cross '/' here"
    return ""


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile to a regular expression for ``fullmatch`` on a normalised path."""
    pattern = _written_out(pattern)
    pieces: list[str] = []
    position = 0
    while position < len(pattern):
        piece, position = _translate(pattern, position)
        pieces.append(piece)
    # Each wildcard takes the shortest text with which the pieces up to the next wildcard of its kind match, and is then
    # fixed by an atomic group: the next wildcard can take all text that a longer match would take. Without atomic
    # groups, "*a*a*a*a*a*b" tries every way to divide "aaaa…", which takes days for a name of 255 bytes.
    *runs, last = [_run(run) for run in _split(pieces, (_FOLDERS, _ACROSS, _BELOW))]
    return re.compile("".join(f"(?>{run})" for run in runs) + last, re.DOTALL)


def literal_start(pattern: str) -> str:
    """The common beginning of all paths that match; without wildcards, the path itself."""
    pattern = _written_out(pattern)
    for position, character in enumerate(pattern):
        if character in "*?" or (character == "[" and _class_end(pattern, position)):
            return pattern[:position]
    return pattern


def _written_out(pattern: str) -> str:
    return (f"{pattern}**" if pattern.endswith("/") else pattern).removeprefix("./")


def _run(pieces: Sequence[str]) -> str:
    """Translate the pieces from one crossing wildcard up to the next."""
    head, *stars = ["".join(run) for run in _split(pieces, (_WITHIN,))]
    return head + "".join(f"(?>{star})" for star in stars[:-1]) + "".join(stars[-1:])


def _split(pieces: Sequence[str], wildcards: Sequence[str]) -> list[list[str]]:
    """Cut before each of these wildcards; the first part contains none and may be empty."""
    runs: list[list[str]] = [[]]
    for piece in pieces:
        if piece in wildcards:
            runs.append([])
        runs[-1].append(piece)
    return runs


def _translate(pattern: str, position: int) -> tuple[str, int]:
    """Translate one piece, and return the position of the next."""
    character = pattern[position]
    at_segment_start = position == 0 or pattern[position - 1] == "/"
    # "**/" at the start of a segment is any number of folders, including none; any other run of two or more stars is
    # any text; a single star or question mark stays in its segment; a class never matches "/".
    if at_segment_start and pattern.startswith("**/", position):
        return _FOLDERS, position + 3
    if pattern.startswith("**", position):
        stop = position
        while stop < len(pattern) and pattern[stop] == "*":
            stop += 1
        return _BELOW if at_segment_start and stop == len(pattern) else _ACROSS, stop
    if character == "*":
        return _WITHIN, position + 1
    if character == "?":
        return "[^/]", position + 1
    if character == "[" and (stop := _class_end(pattern, position)):
        return _character_class(pattern[position + 1 : stop]), stop + 1
    return re.escape(character), position + 1


def _class_end(pattern: str, position: int) -> int:
    """The index of the closing bracket, or 0 when the class is never closed (then ``[`` is an ordinary character)."""
    first = position + 1
    if pattern[first : first + 1] == "!":
        first += 1
    return max(pattern.find("]", first + 1), 0)


def _character_class(body: str) -> str:
    negated = body.startswith("!")
    members = body[1:] if negated else body
    parts: list[str] = []
    position = 0
    while position < len(members):
        if members[position + 1 : position + 2] == "-" and position + 2 < len(members):
            low, high = members[position], members[position + 2]
            if low <= high:  # a reversed range matches nothing, like fnmatch
                parts.append(f"{re.escape(low)}-{re.escape(high)}")
            position += 3
        else:
            parts.append(re.escape(members[position]))
            position += 1
    if negated:
        return f"[^/{''.join(parts)}]"
    return f"(?!/)[{''.join(parts)}]" if parts else "(?!)"


# --- the part of a source that patterns can select, to which a listing can be narrowed ---


def literal_prefixes(patterns: Patterns) -> tuple[str, ...]:
    """Every selected path begins with one of these; ``("",)`` when nothing is known.

    Sorted, none a prefix of another, and at most ``MOST_PREFIXES``: surplus neighbours are replaced by their common
    prefix.
    """
    if not patterns.allow:
        return ("",)
    return common_beginnings(map(literal_start, patterns.allow))


def common_beginnings(texts: Iterable[str]) -> tuple[str, ...]:
    """Every one of ``texts`` begins with one of the results, which are as in ``literal_prefixes``."""
    prefixes = _outermost(texts)
    # Cut between the neighbours with the shortest common prefix; each part becomes the common prefix of its first and
    # last.
    gaps = range(1, len(prefixes))
    by_kinship = sorted(gaps, key=lambda gap: len(commonprefix(prefixes[gap - 1 : gap + 1])))
    cuts = [0, *sorted(by_kinship[: MOST_PREFIXES - 1]), len(prefixes)]
    return tuple(_outermost(commonprefix([prefixes[start], prefixes[stop - 1]]) for start, stop in pairwise(cuts)))


def _outermost(prefixes: Iterable[str]) -> list[str]:
    """Drop texts that begin with another one. A prefix sorts directly before all texts that begin with it."""
    outermost: list[str] = []
    for prefix in sorted(prefixes):
        if not outermost or not prefix.startswith(outermost[-1]):
            outermost.append(prefix)
    return outermost


class AuthMethod(StrEnum):
    """The ways to sign in, named as in ``truss``."""

    CUSTOM_SECRET = "CUSTOM_SECRET"  # noqa: S105 - a method's name, not a secret
    AWS_OIDC = "AWS_OIDC"
    GCP_OIDC = "GCP_OIDC"
    AWS_ASSUME_ROLE = "AWS_ASSUME_ROLE"


# The fields of each method, and the schemes that it opens.
METHODS: Final[dict[AuthMethod, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    AuthMethod.CUSTOM_SECRET: (("auth_secret_name",), ("azure", "cw", "gs", "hf", "https", "r2", "s3")),
    AuthMethod.AWS_OIDC: (("aws_oidc_role_arn", "aws_oidc_region"), ("s3",)),
    AuthMethod.GCP_OIDC: (("gcp_oidc_service_account", "gcp_oidc_workload_id_provider"), ("gs",)),
    AuthMethod.AWS_ASSUME_ROLE: (("aws_assume_role_arn", "aws_assume_role_region"), ("s3",)),
}


@dataclass(frozen=True, slots=True)
class Auth:
    """A method with exactly its own fields; ``fields`` maps each field's name to its non-empty value."""

    method: AuthMethod
    fields: dict[str, str] = field(hash=False)

    def __post_init__(self) -> None:
        required, _ = METHODS[self.method]
        if missing := [name for name in required if not self.fields.get(name)]:
            raise InvalidRequestError(f"{', '.join(missing)} must be provided when auth_method is {self.method}")
        if extra := [name for name in self.fields if name not in required]:
            raise InvalidRequestError(f"{', '.join(extra)} cannot be specified when auth_method is {self.method}")


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """One source of a request. ``mount_location`` is normalised."""

    source: SourceUri
    mount_location: str
    patterns: Patterns = EVERYTHING
    auth: Auth | None = None

    def __post_init__(self) -> None:
        if normalise_mount(self.mount_location) != self.mount_location:
            raise InvalidMountError(self.mount_location, "is not normalised")
        if self.auth and self.source.scheme not in METHODS[self.auth.method][1]:
            raise InvalidRequestError(f"auth_method {self.auth.method} does not fit {self.source.scheme}:// sources")


def normalise_mount(location: str) -> str:
    """Return an absolute path without empty or ``.`` segments and without a trailing slash.

    Raises ``InvalidMountError``: relative, the root, or with ``..`` or NUL.
    """
    if not location.startswith("/"):
        raise InvalidMountError(location, "must be an absolute path (start with /)")
    if "\0" in location or ".." in location.split("/"):
        raise InvalidMountError(location, "must not hold NUL or '..'")
    segments = [segment for segment in location.split("/") if segment not in ("", ".")]
    if not segments:
        raise InvalidMountError(location, "must not be the root directory")
    if any(len(segment.encode("utf-8", "surrogatepass")) > 255 for segment in segments):
        raise InvalidMountError(location, "has a segment of more than 255 bytes")
    return "/" + "/".join(segments)


def check_mounts(locations: Sequence[str]) -> None:
    """Refuse equal or nested mounts of one request.

    Raises ``InvalidMountError``, which names the second of the pair.
    """
    for first, second in pairwise(sorted(locations, key=lambda location: location.split("/"))):
        if first == second:
            raise InvalidMountError(second, "is used twice; each source needs a mount location of its own")
        if second.startswith(f"{first}/"):
            raise InvalidMountError(second, f"is inside {first!r}, another mount of this request")


Scheme = Literal["azure", "bt", "cw", "gs", "hf", "https", "r2", "s3"]
SCHEMES: Final = get_args(Scheme)
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")  # as people copy it from the hub's pages
_SUPPORTED: Final = ", ".join(f"{scheme}://" for scheme in SCHEMES)
_USER_AND_COLON: Final = re.compile(r"://[^/@:]*:")
_USER_INFO: Final = re.compile(r"://[^/]*@")
_HTTPS_PLACE: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")
_UNTIL_QUERY: Final = re.compile(r"[?#\x00-\x1f\x7f]")
_HUB_PAGE: Final = re.compile(
    r"(?:huggingface\.co|hf\.co)/((?:datasets/|spaces/)?[\w.-]+/[\w.-]+)(?:/tree/([\w.-]+))?/?"
)
_BUCKET_PAGE: Final = re.compile(r"(?:huggingface\.co|hf\.co)/(buckets/[\w.-]+/[\w.-]+)(?:/tree(/[\w./-]+)?)?/?")
_REPO_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_AZURE_ACCOUNT: Final = re.compile(r"[a-z0-9]{3,24}")
_AZURE_CONTAINER: Final = re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}|\$root|\$web|\$logs")
_R2_AUTHORITY: Final = re.compile(r"([A-Za-z0-9-]+)\.(?:([a-z]+)\.)?([a-z0-9][a-z0-9-]+)")

PROJECT_PATTERN: Final = r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,126}[A-Za-z0-9._-])?"
_PROJECT: Final = re.compile(PROJECT_PATTERN)
_JOB: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RANK: Final = re.compile(r"#rank-(0|[1-9][0-9]{0,5})$")
LATEST: Final = "latest"

RepoKind = Literal["model", "dataset", "space", "kernel"]
REPO_KINDS: Final[Mapping[str, RepoKind]] = {
    "datasets": "dataset",
    "spaces": "space",
    "kernels": "kernel",
}  # by first segment


@dataclass(frozen=True, slots=True)
class HuggingFaceUri:
    """A repository of the hub. ``revision`` is a branch, tag, commit or ``refs/pr/N``; None: the default branch."""

    kind: RepoKind
    repo_id: str
    revision: str | None

    scheme: ClassVar[Literal["hf"]] = "hf"

    @property
    def commit(self) -> str | None:
        """The revision if it is a commit, whose content never changes."""
        return self.revision if self.revision is not None and COMMIT.fullmatch(self.revision) else None

    def __str__(self) -> str:
        kind = "" if self.kind == "model" else f"{self.kind}s/"
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"hf://{kind}{self.repo_id}{revision}"


@dataclass(frozen=True, slots=True)
class BucketUri:
    """A folder of a bucket, the whole bucket, or one object.

    ``prefix`` is the rest of the URI as written: ``""`` is the whole bucket, a trailing ``/`` a folder, anything else a
    folder or exactly one object, which only a listing can decide.
    """

    scheme: Literal["s3", "gs", "r2", "cw", "azure", "hf"]
    bucket: str  # Azure's container
    prefix: str
    account: str = ""  # r2, azure and hf only; the hub's namespace
    jurisdiction: str = ""  # r2 only, "" is the default

    def __str__(self) -> str:
        account = f"{self.account}{'.' if self.scheme == 'r2' else '/'}" if self.account else ""
        kind = "buckets/" if self.scheme == "hf" else ""
        jurisdiction = f"{self.jurisdiction}." if self.jurisdiction else ""
        prefix = f"/{self.prefix}" if self.prefix else ""
        return f"{self.scheme}://{kind}{account}{jurisdiction}{self.bucket}{prefix}"


@dataclass(frozen=True, slots=True)
class CheckpointUri:
    """A checkpoint of one rank of a job.

    ``job`` None: the project's newest job; ``checkpoint`` None: the newest one.

    ``checkpoint`` is a folder's name, or ``.`` for files outside of folders.
    """

    project: str
    job: str | None = None
    checkpoint: str | None = None
    rank: int = 0

    scheme: ClassVar[Literal["bt"]] = "bt"

    def __str__(self) -> str:
        job = "" if self.job is None else f"@{self.job}"
        checkpoint = "" if self.checkpoint is None else f"/{self.checkpoint}"
        return f"bt://{self.project}{job}{checkpoint}{f'#rank-{self.rank}' if self.rank else ''}"


@dataclass(frozen=True, slots=True)
class HttpsUri:
    """One file. ``path`` is as written: percent-encoded, or with characters that are encoded on the wire."""

    place: str  # host and port
    path: str  # without its leading slash

    scheme: ClassVar[Literal["https"]] = "https"

    def __str__(self) -> str:
        return f"https://{self.place}/{self.path}"


SourceUri = HuggingFaceUri | BucketUri | CheckpointUri | HttpsUri


def parse_source(text: str) -> SourceUri:
    """Parse a source URI.

    Raises ``InvalidSourceError``; credentials inside the URI are refused without repeating them.
    """
    if (shown := _without_credentials(text)) != text:
        raise InvalidSourceError(
            shown, "credentials do not belong in a source URI; store them as a secret and name it in auth"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        user, colon, password = text.partition(":")
        shown = f"{user}{colon}***@{password.rpartition('@')[2]}" if "@" in password else text
        likely = f". Did you mean hf://{text}?" if _HUB_NAME.fullmatch(text) else ""
        raise InvalidSourceError(
            shown, f"Source {shown!r} is missing a URI scheme. Supported schemes: {_SUPPORTED}{likely}"
        )
    if scheme not in SCHEMES:
        shown = _USER_INFO.sub("://***@", text).partition("?")[0]  # a pasted URL may hold a token or a signature
        near = get_close_matches(scheme.lower(), SCHEMES, n=1, cutoff=0.55)  # "az" too
        likely = f". Did you mean {near[0]}://?" if near else ""
        raise InvalidSourceError(
            shown, f"Unsupported source scheme '{scheme}://' in {shown!r}. Supported schemes: {_SUPPORTED}{likely}"
        )
    if scheme == "https":
        _check_bare(text, rest)
    if any(character < " " or character == "\x7f" for character in text):
        raise InvalidSourceError(ascii(text), "control characters do not belong in a source URI")
    if ".." in re.split(r"[/@]", rest):
        raise InvalidSourceError(text, f"Source {text!r} has a '..' segment")
    if scheme == "bt":
        return _parse_checkpoint(text, rest)
    if scheme == "https":
        return _parse_https(text, rest)
    return _parse_hugging_face(text, rest) if scheme == "hf" else _parse_bucket(text, scheme, rest)


def _without_credentials(text: str) -> str:
    """Match user and password greedily: an AWS key may itself hold ``/``, a password ``@``.

    Linear in the length of any text, because a client waits for the refusal.
    """
    found, end = _USER_AND_COLON.search(text), text.rfind("@")
    return f"{text[: found.start()]}://***@{text[end + 1 :]}" if found and found.end() <= end else text


def _check_bare(text: str, rest: str) -> None:
    """Refuse what may hold a credential: a source is stored and shown. The first check, because others repeat the source."""
    shown = _UNTIL_QUERY.split(text, maxsplit=1)[0]
    if "@" in re.split("[/?#]", rest, maxsplit=1)[0]:
        raise InvalidSourceError(
            _USER_INFO.sub("://***@", shown),
            "credentials do not belong in a source URI; store them as a secret and name it in auth",
        )
    if shown != text:
        raise InvalidSourceError(
            shown,
            f"Source {shown!r} has a query, a fragment or control characters, which may hold a credential; leave them away, "
            "and store credentials as a secret and name it in auth",
        )


def _parse_https(text: str, rest: str) -> HttpsUri:
    likely = None
    if page := _BUCKET_PAGE.fullmatch(rest):
        likely = f"{page[1]}{page[2] or ''}"
    elif page := _HUB_PAGE.fullmatch(rest):
        likely = f"{page[1]}@{page[2]}" if page[2] else page[1]
    if likely is not None:
        raise InvalidSourceError(
            text, f"Source {text!r} is a page of the hub and not a file. Did you mean hf://{likely}?"
        )
    place, _, path = rest.partition("/")
    found = _HTTPS_PLACE.fullmatch(place)
    if not found or not 0 < int((found[2] or ":443")[1:]) < 65536 or not path or path.endswith("/"):
        raise InvalidSourceError(
            text, f"Invalid HTTPS URL format: {text!r}. Expected format: https://hostname[:port]/path, of one file"
        )
    return HttpsUri(place, path)


def _parse_hugging_face(text: str, rest: str) -> HuggingFaceUri | BucketUri:
    if rest.startswith("buckets/"):
        return _parse_hub_bucket(text, rest)
    name, at, revision = rest.partition("@")
    if at and not revision:
        raise InvalidSourceError(
            text, f"Source {text!r} has an empty revision after '@'; leave the '@' away for the default branch"
        )
    segments = name.split("/")
    kind = REPO_KINDS.get(segments[0], "model")
    segments = segments[kind != "model" :]
    if len(segments) != 2 or not all(_REPO_NAME.fullmatch(segment) for segment in segments):
        raise _invalid_hugging_face(text)
    return HuggingFaceUri(kind, "/".join(segments), revision or None)


def _parse_hub_bucket(text: str, rest: str) -> BucketUri:
    if "@" in rest:
        raise InvalidSourceError(text, f"Source {text!r} has an '@'; buckets of the hub have no revisions")
    _, namespace, name, prefix = (*rest.split("/", 3), "", "")[:4]
    if not _REPO_NAME.fullmatch(namespace) or not _REPO_NAME.fullmatch(name):
        raise _invalid_hugging_face(text)
    return BucketUri("hf", name, prefix, namespace)


def _invalid_hugging_face(text: str) -> InvalidSourceError:
    return InvalidSourceError(
        text,
        f"Invalid HuggingFace URI format: {text!r}. Expected format: hf://owner/repo[@revision], "
        "hf://datasets/owner/repo, hf://spaces/owner/repo, hf://kernels/owner/repo or hf://buckets/namespace/name[/prefix]",
    )


def _is_folder_name(name: str) -> bool:
    """Whether a file system accepts the name, and it is Unicode: non-UTF-8 names on disk have lone surrogates."""
    try:
        return 0 < len(name.encode()) <= 255 and not set("/\\") & set(name)
    except UnicodeEncodeError:
        return False


def _parse_checkpoint(text: str, rest: str) -> CheckpointUri:
    found = _RANK.search(rest)
    name, slash, checkpoint = (rest[: found.start()] if found else rest).partition("/")
    project, at, job = name.partition("@")
    project = project.replace("%20", " ")
    if not (
        _PROJECT.fullmatch(project) and (not at or _JOB.fullmatch(job)) and (not slash or _is_folder_name(checkpoint))
    ):
        raise InvalidSourceError(
            text,
            f"Invalid checkpoint URI format: {text!r}. Expected format: bt://project[@job][/checkpoint][#rank-N], where a job "
            f"may be {LATEST!r} and a checkpoint is the name of one folder",
        )
    return CheckpointUri(
        project, None if job in ("", LATEST) else job, checkpoint or None, int(found[1]) if found else 0
    )


_WITHOUT_ACCOUNT: Final[Mapping[str, Literal["cw", "gs", "s3"]]] = {"cw": "cw", "gs": "gs", "s3": "s3"}


def _parse_bucket(text: str, scheme: str, rest: str) -> BucketUri:
    name = scheme.upper()
    if scheme == "s3" and rest.startswith("arn:"):
        raise InvalidSourceError(
            text,
            f"Source {text!r} is an ARN; use the access point's alias as the bucket: s3://NAME-…-s3alias/path "
            "('aws s3control get-access-point' shows the alias)",
        )
    if "@" in rest:
        raise InvalidSourceError(
            text,
            f"The @ revision syntax is only valid for HuggingFace sources (hf://). "
            f"Source {text!r} uses {name} which does not support revisions.",
        )
    authority, _, prefix = rest.partition("/")
    if scheme == "azure":
        container, _, prefix = prefix.partition("/")
        if not _AZURE_ACCOUNT.fullmatch(authority) or not _AZURE_CONTAINER.fullmatch(container):
            raise InvalidSourceError(
                text, f"Invalid AZURE URI format: {text!r}. Expected format: azure://account/container[/path]"
            )
        return BucketUri("azure", container, prefix, authority)
    if scheme == "r2":
        match = _R2_AUTHORITY.fullmatch(authority)
        if not match:
            raise InvalidSourceError(
                text, f"Invalid R2 URI format: {text!r}. Expected format: r2://account_id[.jurisdiction].bucket[/path]"
            )
        return BucketUri("r2", match[3], prefix, match[1], match[2] or "")
    if not _BUCKET.fullmatch(authority):
        raise InvalidSourceError(
            text, f"Invalid {name} URI format: {text!r}. Expected format: {scheme}://bucket[/path]"
        )
    return BucketUri(_WITHOUT_ACCOUNT[scheme], authority, prefix)
