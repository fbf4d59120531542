"""What makes a name that is lost, or a fault before one of our services, cost more than time; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_NAMES: Final = "tests/promises/test_network_names.py"
_STAYS: Final = "test_an_upstream_whose_name_stays_lost_is_named_and_nothing_is_published"
_LOCKED: Final = "tests/promises/test_network_database.py"
_STORE: Final = "tests/promises/test_partition.py"
_CLIENTS: Final = "tests/promises/test_network_clients.py"
_NO_FOLDER: Final = (
    "tests/unit/store/test_directory_damage.py"
    "::test_where_all_chunks_should_be_there_is_a_file_and_that_is_no_damage_of_each"
)

BREAKAGES: Final = [
    Breakage(
        "network",
        "bdn/cli/gc.py",
        "whoever waits for a collection gives up at the first fault",
        "await waiting.ask(partial(client.collection, collection.id, LONGEST_WAIT_SECONDS))",
        "await client.collection(collection.id, LONGEST_WAIT_SECONDS)",
        "tests/promises/test_network_clients.py::test_an_operator_s_command_that_waits_goes_on_asking_through_faults[gc]",
    ),
    Breakage(
        "network",
        "bdn/transfer/ranged.py",
        "a failure does not say which host it was",
        "self.asked = url",
        'self.asked = ""',
        f"{_NAMES}::{_STAYS}[hf-content]",
    ),
    Breakage(
        "network",
        "bdn/sources/s3/errors.py",
        "a failure does not say where S3 was sought",
        'return f" at {urlsplit(address).hostname}" if isinstance(address, str) else ""',
        'return ""',
        f"{_NAMES}::{_STAYS}[s3-listing]",
    ),
    Breakage(
        "network",
        "bdn/sources/gcs/errors.py",
        "a failure does not say where GCS was sought",
        'where = f" at {error.host}" if isinstance(error, aiohttp.ClientConnectorError) else ""',
        'where = ""',
        f"{_NAMES}::{_STAYS}[gs-listing]",
    ),
    Breakage(
        "network",
        "bdn/sources/huggingface/session.py",
        "a name that is lost is no failure of the network",
        "except OSError as error:",
        "except ConnectionError as error:",
        f"{_NAMES}::test_an_upstream_whose_name_is_lost_for_a_while_is_asked_again[hf-listing]",
    ),
    Breakage(
        "network",
        "bdn/net/client/service_client.py",
        "a name that is lost is no failure of the network to clients",
        "except httpx2.RequestError as error:",
        "except httpx2.ReadError as error:",
        f"{_NAMES}::test_a_command_that_cannot_resolve_its_mirror_says_so",
        also=(
            f"{_CLIENTS}::test_commands_end_with_an_error_document_or_the_answer",
            f"{_NAMES}::test_an_agent_that_cannot_resolve_its_mirror_serves_what_it_holds_and_goes_on_when_it_can",
        ),
    ),
    Breakage(
        "network",
        "bdn/net/client/service_client.py",
        "a connection is used again, whatever is left in it",
        "_ONE_REQUEST_EACH = httpx2.Limits(max_keepalive_connections=0)",
        "_ONE_REQUEST_EACH = httpx2.Limits()",
        f"{_CLIENTS}::test_an_answer_that_comes_twice_is_nobody_elses[1]",
    ),
    Breakage(
        "network",
        "bdn/net/client/service_client.py",
        "a client waits for as long as bytes come",
        "async with asyncio.timeout(longest):",
        "async with asyncio.timeout(None):",
        f"{_CLIENTS}::test_a_stage_asked_for_through_a_fault_and_again_is_one_stage[drips]",
    ),
    Breakage(
        "network",
        "bdn/mirror/ingest/requests.py",
        "a request that runs is not joined by its repetition",
        "mirror_id = await mirrors.running(session, organisation, request_key)",
        "mirror_id = None",
        f"{_CLIENTS}::test_a_mirror_asked_for_through_a_fault_and_again_is_one_mirror_and_one_read[ends_at_once]",
    ),
    Breakage(
        "network",
        "bdn/mirror/api/control.py",
        "readiness does not say that the database is locked",
        "self.database.check_writable(PROBE_SECONDS)",
        "pass",
        f"{_LOCKED}::test_a_write_waits_for_a_lock_that_passes",
    ),
    Breakage(
        "network",
        "bdn/mirror/db/database.py",
        "who waits behind a locked writer waits for as long as it takes",
        "async with asyncio.timeout(WRITER_SECONDS):",
        "async with asyncio.timeout(None):",
        f"{_LOCKED}::test_a_lock_that_stays_is_named_to_whoever_writes",
    ),
    Breakage(
        "network",
        "bdn/store/directory.py",
        "what could not be unlinked lies aside until the next start",
        "if digests is None:",
        "if False:",
        f"{_STORE}::test_an_eviction_that_the_disk_refuses_is_made_up_for_by_the_next_collection[unlink]",
    ),
    Breakage(
        "network",
        "bdn/store/directory.py",
        "a failure of the disk is nobody's",
        'raise StoreUnavailableError(f"{self._root}: {error.strerror or error}") from error',
        "raise",
        f"{_STORE}::test_a_store_that_is_away_is_named_to_everybody_and_comes_back_whole",
    ),
    Breakage(
        "network",
        "bdn/store/directory.py",
        "a store that is away is damage of each of its chunks",
        "                self._check_is_open()  #",
        "                pass  #",
        f"{_STORE}::test_a_verification_of_a_store_that_is_away_calls_nothing_damaged_and_goes_on_when_it_is_back",
        also=(_NO_FOLDER,),
    ),
    Breakage(
        "network",
        "bdn/store/directory.py",
        "where the chunks should be there is a file and that is a store",
        'os.scandir(f"{self._chunks}/.")',
        "os.scandir(self._root)",
        _NO_FOLDER,
    ),
    Breakage(
        "network",
        "bdn/mirror/retention/collector.py",
        "rows go although the store is away",
        "await asyncio.to_thread(lambda: list(self.store.stored(())))",
        "await asyncio.sleep(0)",
        f"{_STORE}::test_a_store_that_is_away_is_named_to_everybody_and_comes_back_whole",
    ),
    Breakage(
        "load",
        "bdn/net/api_server/http_server.py",
        "who does not read is written to all the same",
        "    request_seconds = REQUEST_SECONDS\n",
        "    request_seconds = REQUEST_SECONDS\n    pause_writing = lambda self: None\n",
        "tests/promises/test_load.py::test_listeners_that_never_read_cost_a_bounded_buffer_each_and_delay_nobody",
    ),
    Breakage(
        "network",
        "bdn/net/client/service_client.py",
        "who waits ends at the first fault",
        "                if delay is None or now() + delay > until:\n",
        "                if True:\n",
        "tests/promises/test_network_clients.py::test_a_command_that_waits_goes_on_asking_through_faults_and_says_so",
    ),
]
