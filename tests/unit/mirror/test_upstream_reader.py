"""A location is asked for once, and again when it is refused or about to expire."""

from bdn.core.source.upstream import Identity, Location, UpstreamFile
from bdn.mirror.upstream.reader import LocatedFile

FILE = UpstreamFile("a", 1, Identity.of("public", "a"), "a", "v")


class Signer:
    """A source whose locations live for an hour."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.signed = 0

    async def locate(self, file: UpstreamFile) -> Location:
        self.signed += 1
        return Location(f"https://bucket/a?{self.signed}", expires_at=self.now + 3600)


async def test_a_location_is_kept_until_it_is_about_to_expire() -> None:
    signer = Signer()
    located = LocatedFile("s3://bucket", signer, FILE, clock=lambda: signer.now)
    first = await located.location()
    signer.now += 3600 - 61
    assert await located.location() is first
    signer.now += 1
    assert (await located.location()).url == "https://bucket/a?2"


async def test_of_two_who_were_refused_with_the_same_location_one_asks_for_another() -> None:
    signer = Signer()
    located = LocatedFile("s3://bucket", signer, FILE, clock=lambda: signer.now)
    first = await located.location()
    second = await located.location(refused=first)
    assert await located.location(refused=first) is second
    assert signer.signed == 2
