"""By which right bytes are fetched when nobody asks for them: a grant that some job gave this node."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bdn.core.digest import Digest
from bdn.core.errors import BdnError, GrantInvalidError
from node_agent.stage.registry import StageBook
from node_agent.trust import Trust


@dataclass(frozen=True)
class Rights:
    """Grants of stages that this node knows, and of commands that are being carried out.

    Whose job has ended is asked as well: a grant is good until it expires, and what it names is still held here.
    ``is_open`` is whether the mirror asks nobody for grants; then one that has expired does as well.
    """

    book: StageBook
    trust: Trust
    is_open: bool
    _lent: list[str] = field(default_factory=list)

    @contextmanager
    def lent_by(self, grants: Sequence[str]) -> Iterator[None]:
        """Use these as well until the block ends."""
        self._lent.extend(grants)
        try:
            yield
        finally:
            for grant in grants:
                self._lent.remove(grant)

    def find(self, manifests: Collection[Digest]) -> tuple[Digest, str]:
        """One of these manifests, and a grant that allows it.

        Raises:
            GrantInvalidError: there is none.
        """
        for token in self._lent:
            if (named := self._valid(token, manifests)) is not None:
                return named, token
        known = [
            (manifest, stage.record.grant)
            for stage in self.book.all()
            for manifest in stage.record.manifests
            if manifest in manifests
        ]
        for manifest, token in known:
            if self._valid(token, (manifest,)) is not None:
                return manifest, token
        if known and self.is_open:
            return known[0]
        raise GrantInvalidError("no stage of this node has one that is still good for what is to be fetched")

    def _valid(self, token: str, manifests: Collection[Digest]) -> Digest | None:
        try:
            grant = self.trust.verify(token)
        except BdnError:
            return None
        return next((manifest for manifest in manifests if grant.allows(manifest)), None)
