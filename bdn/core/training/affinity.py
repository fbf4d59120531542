"""The cluster rule for jobs with a training cache: a project is pinned to the cluster of its first cache."""

from collections.abc import Collection

from bdn.core.errors import CacheAffinityError


def place(
    project: str,
    *,
    pinned: str | None,
    offering: Collection[str],
    asking: str,
    gpu_type: str | None,
    require_cache_affinity: bool,
) -> str:
    """The cluster where a job of the project runs.

    Args:
        project: for messages.
        pinned: the cluster of the project's first job with a cache; None: no such job yet.
        offering: clusters that have the GPU type, busy or not.
        asking: where the job would run without a cache.
        gpu_type: for messages; None: the job needs no certain type.
        require_cache_affinity: rather fail than begin with an empty cache in another cluster.

    Raises:
        CacheAffinityError: the pinned cluster lacks such GPUs and the job requires its cache; or no cluster has them.
    """
    if pinned is None or pinned in offering:
        return pinned or asking
    if require_cache_affinity or not offering:
        raise CacheAffinityError(project, pinned, gpu_type, is_offered=False)
    return asking if asking in offering else min(offering)
