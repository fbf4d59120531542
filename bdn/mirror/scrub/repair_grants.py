"""Grants for agents that mend what they hold: theirs end after a day, and what they hold stays for months."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bdn.core.digest import Digest
from bdn.core.grant import Grant, GrantedMount
from bdn.mirror.db import agents, mirrors
from bdn.mirror.db.database import Database
from bdn.wire.grants import GrantSigner

_AT_ONCE: Final = 256  # manifests of one grant, which has to fit into the head of a request


@dataclass(frozen=True)
class Lending:
    """Makes them anew for each answer to a heartbeat, and keeps none."""

    database: Database
    signer: GrantSigner
    grant_seconds: int

    async def grants(self, organisation: str, cluster: str, node: str, manifests: Sequence[str] | None) -> list[str]:
        """For what the node holds of these manifests (None: of any) and was ever mirrored for the organisation.

        Also for what it gave up: the node holds that all the same, and other agents may have the right bytes.
        """
        async with self.database.read() as session:
            held = await agents.manifests_on(session, cluster, node)
            wanted = sorted(held if manifests is None else held & set(manifests))
            sources = await mirrors.sources_by_manifest(
                session, organisation, [manifest.removeprefix("b3:") for manifest in wanted]
            )
        mounts = [
            GrantedMount(f"/{number}", Digest.parse(manifest), sources[manifest.removeprefix("b3:")][0])
            for number, manifest in enumerate(wanted)
            if manifest.removeprefix("b3:") in sources
        ]
        return list(self._signed(organisation, mounts))

    def _signed(self, organisation: str, mounts: Sequence[GrantedMount]) -> Iterator[str]:
        for start in range(0, len(mounts), _AT_ONCE):
            grant = Grant(organisation, tuple(mounts[start : start + _AT_ONCE]), time.time() + self.grant_seconds)
            yield self.signer.sign(grant)
