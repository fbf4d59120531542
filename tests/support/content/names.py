"""Digests by a word, so that a test can speak of content without making any."""

from bdn.core.cache.index import Holder
from bdn.core.chunk import Digest, digest_of


def named(word: str) -> Digest:
    """The digest of the word itself: equal words, equal digests."""
    return digest_of(word.encode())


def sizes(**size_by_word: int) -> dict[Digest, int]:
    """``sizes(a=3)``: content ``a`` has 3 bytes."""
    return {named(word): size for word, size in size_by_word.items()}


def stage(name: str) -> Holder:
    """The holder that stages for job ``job-<name>``."""
    return Holder(name, f"job-{name}")
