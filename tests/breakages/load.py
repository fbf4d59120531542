"""Ways to break the promise `load`."""

# fmt: off
BREAKAGES: dict[str, list[tuple[str, ...]]] = {
    "bdn/disk/durable.py": [
        ("each folder that is synced stays open", "yield descriptor\n    finally:\n        os.close(descriptor)",
         "yield descriptor\n    finally:\n        pass", "test_nothing_grows_under_a_mixed_load"),
    ],
    "bdn/mirror/db/database.py": [
        ("who cannot write at once is turned away", "async with asyncio.timeout(WRITER_SECONDS):",
         "async with asyncio.timeout(0):", "test_agents_that_ask_all_at_once_cost_the_upstream_one_read"),
    ],
    "bdn/mirror/ingest/requests.py": [
        ("equal requests are not taken for equal", "digest_of(json.dumps(asked, sort_keys=True).encode()).hex",
         "secrets.token_hex(32)", "test_a_thousand_requests_for_ten_sources_are_ten_mirrors[sqlite]"),
    ],
    "bdn/mirror/db/waiting.py": [
        ("where a look takes long, each listener looks for itself",
         "oldest = asked if anew else min(asked, self._clock() - self._seconds(result))",
         "oldest = max(asked if anew else 0.0, self._clock() - self._seconds(result))",
         "test_a_hundred_who_ask_at_once_cost_two_looks_however_long_one_takes"),
        ("where the database is away, each who asks the same waits for all before him", "self._failure[0] >= asked",
         "False", "test_a_hundred_who_ask_at_once_are_told_the_error_of_two_looks"),
        ("every listener looks for itself", "if began >= oldest and changes == self._topic.changes:", "if False:",
         "test_many_listeners_share_one_look_and_all_hear_the_end"),
        ("a change that another process has told is not looked at", "began >= oldest and changes == self._topic.changes",
         "began >= oldest", "test_however_many_watch_a_mirror_each_change_of_it_is_read_once[straight]"),
        ("what nobody asks any more is remembered", "WeakValueDictionary[_Key, SharedRead[_Result]] = WeakValueDictionary()",
         "dict[_Key, SharedRead[_Result]] = {}",
         "test_many_listeners_share_one_look_and_all_hear_the_end"),
    ],
    "bdn/net/api_server.py": [
        ("who does not read is written to all the same", "super().pause_writing()", "pass",

         "test_listeners_that_never_read_cost_a_bounded_buffer_each_and_delay_nobody"),
    ],
}
