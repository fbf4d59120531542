"""Where a job with a training cache may run: a project is pinned to the cluster that had its cache first."""

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
    """The cluster where a job of the project that asks in the cluster ``asking`` runs, with the cache that the project has there.

    Args:
        project: for people.
        pinned: where the project's first job with a cache was; None before.
        offering: clusters that have the GPU type, busy or not.
        asking: where the job would run if the project had no cache.
        gpu_type: for people; None: the job takes any, or none.
        require_cache_affinity: the job would rather fail than begin with an empty cache in another cluster.

    Raises:
        CacheAffinityError: the pinned cluster has no such GPUs, and the job has to have its cache; or no cluster has any.
    """
    if pinned is None or pinned in offering:
        return pinned or asking
    if require_cache_affinity or not offering:
        raise CacheAffinityError(project, pinned, gpu_type, is_offered=False)
    return asking if asking in offering else min(offering)
