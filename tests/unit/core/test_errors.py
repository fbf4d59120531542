"""The tree of errors: codes, facts, messages; and of the errors of a task group, one."""

import json
import re
from dataclasses import is_dataclass

import pytest

from bdn.core import errors
from bdn.core.errors import BdnError, NotFoundError, StoreUnavailableError, single_error

TRANSIENT = {"QUOTA_EXCEEDED", "UPSTREAM_UNAVAILABLE", "UPSTREAM_RATE_LIMITED", "STORE_UNAVAILABLE", "CACHE_FULL"}
GROUPS = {"CallerError", "UpstreamError", "ServiceError"}  # between the root and the leaves; never raised themselves

EXAMPLES: list[tuple[BdnError, list[str]]] = [
    (errors.InvalidRequestError("weights is empty"), ["weights is empty"]),
    (errors.InvalidSourceError("s3://", "needs a bucket"), ["s3://", "needs a bucket"]),
    (errors.ForeignRequestError("Host", "evil.example"), ["Host", "evil.example", "BDN_AUTH=token"]),
    (errors.InvalidMountError("m", "must be absolute"), ["'m'", "must be absolute"]),
    (errors.AuthRequiredError("hf://o/r", "401"), ["hf://o/r", "401", "CUSTOM_SECRET", "--secret"]),
    (errors.SecretNotFoundError("hf_token"), ["'hf_token'", "BDN_SECRET_hf_token", "BDN_SECRETS_DIR"]),
    (errors.SecretMalformedError("aws", "lacks aws_access_key_id"), ["'aws'", "lacks aws_access_key_id"]),
    (errors.NoFilesMatchedError("hf://o/r", 3, ("*.x",), ("y",), "try **/*.x"), ["3 files", "*.x", "ignore_patterns 'y'", "try **/*.x"]),
    (errors.LimitExceededError("files in a manifest", 11, 10), ["files in a manifest", "11", "10"]),
    (errors.EgressRefusedError("169.254.169.254", "it is link-local"), ["169.254.169.254", "BDN_EGRESS_ALLOW"]),
    (errors.NotFoundError("mirror mir_1"), ["mirror mir_1"]),
    (errors.UnauthenticatedError(), ["Authorization: Bearer", "BDN_TOKEN"]),
    (errors.GrantInvalidError("bad signature"), ["bad signature"]),
    (errors.GrantExpiredError("2026-01-01T00:00:00Z"), ["2026-01-01T00:00:00Z", "again"]),
    (errors.InUseError("manifest b3:0", ("job a", "job b")), ["manifest b3:0", "job a, job b"]),
    (errors.NotSupportedError("an SSH session", "use logs"), ["an SSH session", "use logs"]),
    (errors.CanceledError("mirror mir_1"), ["mirror mir_1"]),
    (errors.CacheAffinityError("llama", "east", "H200"), ["llama", "east", "H200", "require_cache_affinity", "request GPUs"]),
    (errors.CacheNotSharedError("east", "v1", "v2"), ["east", "v1", "v2", "BDN_AGENT_VOLUME_ROOT"]),
    (errors.CacheOverQuotaError("llama", 2 * 10**12, 10**12), ["llama", "2 TB", "1 TB", "bdn-admin cache rm llama"]),
    (errors.PushGivenUpError("bt://p@j/c"), ["bt://p@j/c", "push again"]),
    (errors.ChunksMissingError(2, ("b3:0",)), ["2 chunks", "b3:0", "commit again"]),
    (errors.ScratchFullError("/scratch", 5000, 4000), ["/scratch", "5 KB", "4 KB", "stop the run"]),
    (errors.QuotaExceededError(5000, 4000), ["5 KB", "4 KB", "BDN_LIMIT_PUSH_BYTES"]),
    (errors.SourceNotFoundError("hf://o/r", "404"), ["hf://o/r", "404"]),
    (errors.RevisionNotFoundError("hf://o/r", "v9"), ["hf://o/r", "'v9'"]),
    (errors.GatedSourceError("hf://o/r"), ["hf://o/r", "accept its terms"]),
    (errors.SourceChangedError("s3://b", "a/x", "another ETag"), ["s3://b", "'a/x'", "another ETag", "mirror it again"]),
    (errors.SourceArchivedError("s3://b", "a/x", "DEEP_ARCHIVE"), ["s3://b", "'a/x'", "DEEP_ARCHIVE", "restore"]),
    (errors.UpstreamUnavailableError("hf://o/r", "503"), ["hf://o/r", "503"]),
    (errors.UpstreamRateLimitedError("hf://o/r", 2.5), ["hf://o/r", "429", "2.5 s"]),
    (errors.ChecksumMismatchError("a.bin", "aa", "bb"), ["a.bin", "expected aa", "got bb"]),
    (errors.StoreUnavailableError("timeout"), ["timeout"]),
    (errors.NoRoomError("hf://o/m", "9 B are needed"), ["hf://o/m", "9 B are needed", "BDN_STORE", "BDN_AGENT_CACHE_DIR"]),
    (errors.CacheTooSmallError(2_000_000_000, 1_500_000_000), ["2 GB", "1.5 GB", "BDN_AGENT_CACHE_BYTES"]),
    (errors.CacheFullError(4000, 1000, 3000, 5000), ["4 KB", "1 KB", "3 KB", "5 KB"]),
    (errors.DiskFailedError("/cache/x", "EIO"), ["/cache/x", "EIO"]),
    (errors.MountFailedError("/mnt/x", "EPERM"), ["/mnt/x", "EPERM"]),
    (errors.InternalError("impossible"), ["impossible"]),
]  # fmt: skip
EACH_EXAMPLE = pytest.mark.parametrize(
    ("error", "facts"), EXAMPLES, ids=[type(error).__name__ for error, _ in EXAMPLES]
)


def descendants(of: type[BdnError]) -> list[type[BdnError]]:
    direct = [cls for cls in of.__subclasses__() if cls.__module__ == errors.__name__]
    return [*direct, *(deeper for cls in direct for deeper in descendants(cls))]


LEAVES = [cls for cls in descendants(BdnError) if cls.__name__ not in GROUPS]


def test_every_code_has_exactly_one_class_and_only_what_may_heal_by_itself_is_transient() -> None:
    assert len({cls.code for cls in LEAVES}) == len(LEAVES)
    assert [cls.__name__ for cls in LEAVES if "code" not in vars(cls)] == []
    assert {cls.code for cls in LEAVES if cls.transient} == TRANSIENT
    assert {type(error) for error, _ in EXAMPLES} == set(LEAVES)
    unspecific: list[type[BdnError]] = [BdnError, *(cls for cls in descendants(BdnError) if cls.__name__ in GROUPS)]
    assert {cls.code for cls in unspecific} == {"INTERNAL"}


@EACH_EXAMPLE
def test_an_error_is_one_line_and_plain_json_built_from_its_facts(error: BdnError, facts: list[str]) -> None:
    message, details = str(error), error.details()
    assert [fact for fact in facts if fact not in message] == []
    assert "\n" not in message
    assert is_dataclass(error)
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    assert list(details) == list(vars(error))
    assert hash(error) == hash(error)
    assert error != type(error)(**vars(error))  # an error equals only itself


def test_a_message_says_no_more_than_is_known() -> None:
    full = errors.DiskFailedError("/cache/x", "No space left on device", is_full=True, others_bytes=4000)
    alone = errors.DiskFailedError("/cache/x", "No space left on device", is_full=True, others_bytes=0)
    table: list[tuple[BdnError, str]] = [
        (errors.AuthRequiredError("s3://b", "AccessDenied", "Change the trust policy"), "^s3://b refused access \\(AccessDenied\\). Change the trust policy$"),
        (errors.InvalidSourceError("s3://", "Source 's3://' is empty"), "^Source 's3://' is empty$"),
        (errors.NoFilesMatchedError("s3://b", 0, ("*",), ()), "^s3://b holds no files$"),
        (errors.NoFilesMatchedError("s3://b", 2, ("a",), ()), r"^none of the 2 files of s3://b is selected by allow_patterns 'a'$"),
        (errors.UpstreamRateLimitedError("hf://o/r"), "^(?!.*wait)"),
        (errors.UpstreamRateLimitedError("hf://o/r", 0.0), "wait 0 s"),
        (full, "other data took 4 KB of it after BDN reserved the space"),
        (alone, "no other data took space after BDN reserved it"),
        (errors.CacheFullError(4, 9, 0, 9, needed_files=7, free_files=2), "^7 more files do not fit now: the file system has inodes for 2"),
    ]  # fmt: skip
    for error, words in table:
        assert re.search(words, str(error)), error


CHUNK = NotFoundError("chunk")
STORE = StoreUnavailableError("refused")


def leave(error: BaseException | None) -> None:
    with single_error():
        if error:
            raise error


def test_the_cause_of_the_failure_is_kept() -> None:
    failure = StoreUnavailableError("refused")
    failure.__cause__ = ConnectionError("refused")
    with pytest.raises(StoreUnavailableError) as caught:
        leave(ExceptionGroup("group", [failure]))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_an_error_by_itself_or_deep_inside_groups_leaves_them_alone_and_success_passes() -> None:
    leave(None)
    for error in (CHUNK, BaseExceptionGroup("outer", [ExceptionGroup("inner", [CHUNK]), STORE])):
        with pytest.raises(NotFoundError) as caught:
            leave(error)
        assert caught.value is CHUNK
