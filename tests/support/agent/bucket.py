"""The bucket behind a mirror for agents: a private one of a real S3 server, which reads signed addresses and no others."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bdn.core.chunk import Digest
from bdn.sources.s3.signature import AddressSigner
from bdn.sources.settings import S3Credentials
from bdn.wire.location_schema import ChunkLocation, Locations
from tests.doubles.s3 import S3Bucket, S3Server


@dataclass
class AgentBucket:
    """Signs addresses for ``seconds``, and tells agents that they are good for so long. ``asked`` is the number of chunks of each question."""

    server: S3Server
    bucket: S3Bucket
    seconds: int = 900
    asked: list[int] = field(default_factory=list)

    def put(self, chunk: Digest, content: bytes) -> None:
        """An object."""
        self.bucket.put({_key(chunk): content})

    def drop(self, chunk: Digest) -> None:
        """It is lost."""
        self.bucket.delete(_key(chunk))

    def locations(self, digests: Sequence[Digest]) -> Locations:
        """What the mirror answers."""
        self.asked.append(len(digests))
        account, base = self.server.account, f"{self.server.url}/{self.bucket.name}/"
        keys = S3Credentials(account.access_key_id, account.secret_access_key)
        signer = AddressSigner.of(base, "us-east-1", keys, int(time.time()), self.seconds)
        return Locations(
            delivery="direct",
            items=[
                ChunkLocation(
                    digest=str(digest),
                    url=signer.address(_key(digest)),
                    headers={},
                    expires_in_seconds=self.seconds,
                )
                for digest in digests
            ],
        )


def _key(chunk: Digest) -> str:
    return f"b3/{chunk.fanout}"
