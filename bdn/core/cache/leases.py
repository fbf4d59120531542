"""Who needs which manifest, and until when. What is leased is never evicted by LRU or by an ordinary eviction."""

from __future__ import annotations

from dataclasses import dataclass

from bdn.core.digest import Digest


@dataclass(frozen=True, slots=True)
class Holder:
    """One stage of one job. ``expires_at`` is in seconds since the epoch; None means until it is released.

    ``organisation`` is whose stage it is, where that is known.
    """

    stage_id: str
    job_id: str
    expires_at: float | None = None
    organisation: str | None = None

    def __str__(self) -> str:
        return f"job {self.job_id} (stage {self.stage_id})"


class LeaseBook:
    """Holders by manifest. A holder counts until it is released, even past its expiry: ``expired`` says whom to release.

    Releasing at one place keeps the view, the mount and the lease of a stage together; a lease that vanished by itself
    would leave a mount over content that may go.
    """

    def __init__(self) -> None:
        self._by_manifest: dict[Digest, dict[str, Holder]] = {}

    def take(self, manifest: Digest, holder: Holder) -> None:
        """Lease, or renew with a new expiry."""
        self._by_manifest.setdefault(manifest, {})[holder.stage_id] = holder

    def end(self, stage_id: str) -> tuple[Digest, ...]:
        """End all leases of a stage; returns the manifests that it held."""
        held = self.of(stage_id)
        for manifest in held:
            del self._by_manifest[manifest][stage_id]
            if not self._by_manifest[manifest]:
                del self._by_manifest[manifest]
        return held

    def of(self, stage_id: str) -> tuple[Digest, ...]:
        """What a stage holds."""
        return tuple(manifest for manifest, holders in self._by_manifest.items() if stage_id in holders)

    def holders(self, manifest: Digest) -> tuple[Holder, ...]:
        """Who holds this manifest, oldest lease first."""
        return tuple(self._by_manifest.get(manifest, {}).values())

    def is_leased(self, manifest: Digest) -> bool:
        """Whether anybody holds it."""
        return manifest in self._by_manifest

    def leased(self) -> tuple[Digest, ...]:
        """Every manifest that somebody holds."""
        return tuple(self._by_manifest)

    def expired(self, now: float) -> tuple[Holder, ...]:
        """The stages whose time is over at ``now``, each once."""
        over = {
            holder.stage_id: holder
            for holders in self._by_manifest.values()
            for holder in holders.values()
            if holder.expires_at is not None and holder.expires_at <= now
        }
        return tuple(over.values())
