"""What an operator does about each error code; docs/contract.md has the same table."""

from dataclasses import dataclass
from typing import Final

from bdn.wire.shapes import ErrorBody

REMEDIES: Final[dict[str, str]] = {
    "INVALID_REQUEST": "Correct the request as the message says.",
    "NOT_SUPPORTED": "Do what the message names instead.",
    "INVALID_SOURCE": "Correct the source as the message says.",
    "INVALID_MOUNT": "Correct the mount location as the message says.",
    "AUTH_REQUIRED": "Set a secret or a role that may read the source, and mirror it again.",
    "SECRET_NOT_FOUND": "Set the secret with 'bdn-admin secrets set', and mirror the source again.",
    "SECRET_MALFORMED": "Set the secret in the form that the source needs.",
    "NO_FILES_MATCHED": "Correct the patterns; 'bdn mirror --dry-run' shows what they select.",
    "EGRESS_REFUSED": "If the address is meant, add it to BDN_EGRESS_ALLOW.",
    "LIMIT_EXCEEDED": "Select fewer files or sources, or raise the limit that the message names.",
    "NOT_FOUND": "Check the name and the organisation; an evicted manifest may be restored.",
    "UNAUTHENTICATED": "Use a token of the role that the message names.",
    "FOREIGN_REQUEST": "Call localhost or 127.0.0.1, or set BDN_AUTH=token.",
    "GRANT_INVALID": "Use a grant of this mirror; check BDN_URL of the agent.",
    "GRANT_EXPIRED": "Read the mirror again for a fresh grant.",
    "IN_USE": "End what uses it first; the message names the holders.",
    "CANCELED": "Start it again, if its end was not meant.",
    "CHUNKS_MISSING": "Request the list of missing chunks, send them, and commit again.",
    "PUSH_GIVEN_UP": "Push again; chunks that were sent are not sent again.",
    "CACHE_AFFINITY": "Run the job in the cluster that the message names, or set require_cache_affinity to false.",
    "CACHE_NOT_SHARED": "Mount the cluster's volume at BDN_AGENT_VOLUME_ROOT of this node.",
    "SOURCE_NOT_FOUND": "Correct the name; a private repository also needs a token.",
    "REVISION_NOT_FOUND": "Name a branch, a tag or a commit that exists.",
    "GATED_SOURCE": "Accept the terms on the hub with the account that owns the token.",
    "SOURCE_ARCHIVED": "Restore the object at its cloud, and mirror the source again.",
    "SOURCE_CHANGED": "Mirror the source again, once its writer has finished.",
    "CHECKSUM_MISMATCH": "Compare the upstream's object with the evidence in the store, and mirror the source again.",
    "UPSTREAM_UNAVAILABLE": "Mirror the source again; what was copied stays.",
    "UPSTREAM_RATE_LIMITED": "Wait, and mirror the source again; with a token most hubs allow more.",
    "STORE_UNAVAILABLE": "Check the mirror, its database and its store, whichever the message names.",
    "QUOTA_EXCEEDED": "Delete checkpoints with 'bdn checkpoints rm', or raise BDN_LIMIT_PUSH_BYTES.",
    "CACHE_OVER_QUOTA": "Delete files with 'bdn-admin cache rm', or raise the limit with 'bdn-admin cache set'.",
    "NO_ROOM": "Free the file system that the message names, or select fewer files.",
    "SCRATCH_FULL": "Give the job more scratch, or stop it.",
    "CACHE_FULL": "Release stages, or wait for a job to end.",
    "CACHE_TOO_SMALL": "Raise BDN_AGENT_CACHE_BYTES, free the disk, or select fewer files.",
    "DISK_FAILED": "Free or replace the node's disk.",
    "MOUNT_FAILED": "Give the agent CAP_SYS_ADMIN, or set BDN_AGENT_EXPOSURE to symlink.",
    "INTERNAL": "Report it with the lines of the service's log around it.",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """``remedy`` is empty for a code of another version."""

    code: str
    message: str
    remedy: str


def problem_of(error: ErrorBody | None) -> Problem | None:
    return None if error is None else Problem(error.code, error.message, REMEDIES.get(error.code, ""))
