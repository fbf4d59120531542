"""What makes a failure of a source of bytes (an upstream, the mirror's store, a peer) cost more than time, or leaves it unnamed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_FAULTS: Final = "tests/promises/test_network_faults.py"
_UPSTREAMS: Final = "tests/promises/test_network_clients.py"
_PARTITION: Final = "tests/promises/test_partition.py"


def _breakage(file: str, what: str, old: str, new: str, test: str) -> Breakage:
    return Breakage("network", file, what, old, new, test)


BREAKAGES: Final = [
    _breakage(
        "bdn/transfer/http_chunks.py",
        "nobody learns who refused the connection",
        'raise StoreUnavailableError(f"{place}: {reason_of(error)}") from None',
        "raise StoreUnavailableError(reason_of(error)) from None",
        f"{_FAULTS}::test_a_mirror_that_refuses_connections_is_named_and_is_asked_again[content]",
    ),
    _breakage(
        "bdn/transfer/chunk_readers.py",
        "what came wrongly is gone on from",
        "            self.on_mismatch(chunk)\n            chunk.restart()\n",
        "            self.on_mismatch(chunk)\n",
        f"{_FAULTS}::test_a_fault_on_the_way_to_the_mirror_costs_time_alone[content-flips_a_bit]",
    ),
    _breakage(
        "node_agent/fetch/peers.py",
        "a peer that was left for being slow is asked for the next chunk",
        "            self._standing.blame(node, Fault.SLOW, self.clock())\n",
        "",
        f"{_FAULTS}::test_a_peer_that_trickles_is_left_and_counted",
    ),
    _breakage(
        "node_agent/fetch/peers_reader.py",
        "a peer that failed is asked for the next chunk",
        "                self.peers.blame(peer, Fault.FAILED)\n",
        "",
        f"{_PARTITION}::test_a_node_that_sees_the_mirror_and_no_peer_stages_from_the_mirror[resets_at_once]",
    ),
    _breakage(
        "bdn/store/directory.py",
        "a store that is gone is one without chunks",
        '            self._check_is_there()\n            raise NotFoundError(f"chunk {digest}")',
        '            raise NotFoundError(f"chunk {digest}")',
        f"{_PARTITION}::test_a_store_that_goes_away_fails_what_needs_it_and_nothing_is_lost",
    ),
    _breakage(
        "bdn/store/directory.py",
        "nobody learns what the disk said",
        'StoreUnavailableError(f"{self._root}: {error.strerror or error}")',
        'StoreUnavailableError(f"{self._root} failed")',
        "tests/promises/test_partition.py::test_a_copy_that_the_disk_refuses_is_typed_and_goes_on_when_it_does_not[fsync]",
    ),
    _breakage(
        "bdn/transfer/ranged.py",
        "the rest of a range is put at its beginning",
        "rest = self.buffer[self.done :] if self.done else self.buffer",
        "rest = self.buffer",
        f"{_UPSTREAMS}::test_a_fault_on_the_way_from_an_upstream_costs_requests_alone[gs-stalls_in_the_middle]",
    ),
    _breakage(
        "bdn/transfer/ranged.py",
        "nobody learns which source is out of reach",
        'return UpstreamUnavailableError(self._source, f"{self._path}: {reason}")',
        "return UpstreamUnavailableError(self._path, reason)",
        f"{_UPSTREAMS}::test_an_upstream_that_stays_out_of_reach_is_named_and_nothing_is_published[gs-falls_silent]",
    ),
]
