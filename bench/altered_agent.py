"""``bdn-node-agent`` without one of its works, to measure what that work costs: ``python -m … believing|discarding``.

It stands among the benchmarks because nobody is to run it; the agent itself has no such option.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from bdn.disk.direct import DirectFile
from bdn.transfer import chunk_readers
from node_agent.__main__ import main


class _Deaf:
    """A hasher that hears nothing."""

    def update(self, piece: object) -> None:
        pass


@contextmanager
def believing() -> Iterator[None]:
    """What a source brings is neither hashed nor compared with its name."""
    with (
        mock.patch.object(chunk_readers, "blake3", _Deaf),
        mock.patch.object(chunk_readers.PartialChunk, "check", return_value=None),
    ):
        yield


@contextmanager
def discarding() -> Iterator[None]:
    """Files get their size and their name, and nothing is written into them."""
    with mock.patch.object(DirectFile, "write", return_value=None):
        yield


if __name__ == "__main__":
    with {"believing": believing, "discarding": discarding}[sys.argv[1]]():
        main([])
