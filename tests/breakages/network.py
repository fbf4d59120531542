"""What makes a fault of the network cost more than time, or load cost more than once; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_FAULTS: Final = "tests/promises/test_network_faults.py"
_PARTITION: Final = "tests/promises/test_partition.py"
_DATABASE: Final = "test_a_database_that_goes_away_is_named_and_what_ran_goes_on_when_it_is_back"
_LOOK: Final = "tests/unit/mirror/test_shared_read.py"
_LOAD: Final = "tests/promises/test_load.py"

BREAKAGES: Final = [
    Breakage(
        "network",
        "bdn/transfer/http_chunks.py",
        "a body that ends early is taken for the chunk",
        "if chunk.missing:",
        "if chunk.missing < 0:",
        f"{_FAULTS}::test_a_fault_that_lasts_fails_the_stage_and_names_the_place[content-ends_in_the_middle]",
    ),
    Breakage(
        "network",
        "bdn/transfer/http_chunks.py",
        "an error does not say which host failed",
        'raise StoreUnavailableError(f"{place}: {error.reason}") from None',
        "raise",
        f"{_FAULTS}::test_a_fault_that_lasts_fails_the_stage_and_names_the_place[content-falls_silent]",
    ),
    Breakage(
        "network",
        "bdn/transfer/chunk_readers.py",
        "what peers and the mirror send is not compared with its name",
        "if actual != self.digest:",
        "if False:",
        f"{_FAULTS}::test_right_sized_chunks_in_each_others_place_are_found_out",
    ),
    Breakage(
        "network",
        "bdn/wire/errors.py",
        "a document that was damaged on its way fails the stage",
        'code = "CHECKSUM_MISMATCH"\n    transient = True',
        'code = "CHECKSUM_MISMATCH"\n    transient = False',
        f"{_FAULTS}::test_a_fault_on_the_way_to_the_mirror_costs_time_alone[api-flips_a_bit]",
    ),
    Breakage(
        "network",
        "bdn/net/client/mirror_client.py",
        "the answer to another request is taken for the layout",
        "if layout.manifest != digest:",
        "if False:",
        "tests/unit/net/test_service_client.py::test_the_layout_of_another_manifest_is_refused",
    ),
    Breakage(
        "network",
        "node_agent/cache/catalogue.py",
        "a silent mirror is waited for however long it is silent",
        "async with asyncio.timeout(seconds):",
        "async with asyncio.timeout(None):",
        f"{_FAULTS}::test_a_fault_on_the_way_to_the_mirror_costs_time_alone[api-falls_silent]",
    ),
    Breakage(
        "network",
        "node_agent/cache/catalogue.py",
        "peers are not asked for a manifest while the mirror is away",
        "if error.transient and (found := await instead()) is not None:",
        "if False and (found := await instead()) is not None:",
        "tests/integration/test_agent_ring.py::test_a_cluster_serves_a_node_that_joined_last_while_the_mirror_is_away",
    ),
    Breakage(
        "network",
        "node_agent/fetch/peers_reader.py",
        "chunks of a node that joined last are asked of the mirror alone",
        "if not self.peers.is_avoided(peer) and self._ask(peer, chunk, None):",
        "if False:",
        "tests/integration/test_agent_ring.py::test_a_cluster_serves_a_node_that_joined_last_while_the_mirror_is_away",
    ),
    Breakage(
        "network",
        "node_agent/cache/held_chunks.py",
        "a peer gives a manifest to whoever has any grant",
        "if not self.verify(request.bearer).allows(request.manifest):",
        "if not self.verify(request.bearer):",
        "tests/integration/test_agent_ring.py::test_a_peer_gives_a_manifest_only_for_a_grant_that_names_it",
    ),
    Breakage(
        "network",
        "node_agent/fetch/deadlines.py",
        "a peer may be silent for as long as it likes",
        "if (silence := self.clock() - self._heard) >= self.silence_seconds:",
        "if (silence := self.clock() - self._heard) >= 1000 * self.silence_seconds:",
        f"{_FAULTS}::test_a_fault_on_the_way_to_the_mirror_costs_time_alone[content-falls_silent]",
    ),
    Breakage(
        "load",
        "bdn/mirror/single_flight.py",
        "where a look takes long, each listener looks for itself",
        "oldest = asked if anew else min(asked, self._clock() - self._seconds)",
        "oldest = max(asked if anew else 0.0, self._clock() - self._seconds)",
        f"{_LOOK}::test_a_hundred_who_ask_at_once_cost_two_looks_however_long_one_takes",
    ),
    Breakage(
        "load",
        "bdn/mirror/single_flight.py",
        "where the database is away, each who asks the same waits for all before him",
        "if self._failure is not None and self._failure[0] >= asked:",
        "if self._failure is not None and False:",
        f"{_LOOK}::test_a_hundred_who_ask_at_once_are_told_the_error_of_two_looks",
    ),
    Breakage(
        "load",
        "bdn/mirror/single_flight.py",
        "every listener looks for itself",
        "if self._result is not None and self._result[0] >= oldest:",
        "if False:",
        f"{_LOAD}::test_many_listeners_share_one_look_and_all_hear_the_end",
    ),
    Breakage(
        "load",
        "bdn/mirror/single_flight.py",
        "what nobody asks any more is remembered",
        "if not in_use.users:",
        "if in_use.users > 1_000_000:",
        f"{_LOAD}::test_many_listeners_share_one_look_and_all_hear_the_end",
    ),
    Breakage(
        "load",
        "bdn/mirror/ingest/requests.py",
        "equal requests are not taken for equal",
        "request_key = digest_of(json.dumps(bodies, sort_keys=True).encode()).hex",
        "request_key = secrets.token_hex(32)",
        f"{_LOAD}::test_a_thousand_requests_for_ten_sources_are_ten_mirrors[sqlite]",
    ),
    Breakage(
        "network",
        "bdn/mirror/db/alone.py",
        "a lock whose connection is gone swallows the end of the service",
        "with suppress(SQLAlchemyError, OSError):\n            await connection.close()",
        "with suppress(ZeroDivisionError):\n            await connection.close()",
        "tests/promises/test_network_database.py::test_who_lost_the_session_hears_of_it_at_once",
    ),
    Breakage(
        "network",
        "bdn/mirror/api/control.py",
        "readiness does not say that the database is silent",
        'raise StoreUnavailableError(f"{what} has not answered for {PROBE_SECONDS:g} s") from None',
        "raise",
        f"{_PARTITION}::{_DATABASE}[parted]",
    ),
    Breakage(
        "network",
        "node_agent/fetch/documents.py",
        "nobody is asked for a layout",
        "if layout is not None and layout.covers(manifest.contents):",
        "if False:",
        f"{_PARTITION}::test_a_cluster_serves_what_it_holds_while_the_mirror_is_away_for_the_whole_stage[parted]",
    ),
]
