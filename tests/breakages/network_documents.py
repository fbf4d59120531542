"""Ways to believe a document that was damaged on its way, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/promises/test_network_faults.py::"
_HEARTBEAT = f"{_TEST}test_a_heartbeat_s_answer_with_a_wrong_bit_costs_an_error_and_no_truth"

BREAKAGES: Final = [
    Breakage(
        "hostile-input",
        "bdn/net/client/service_client.py",
        "an answer is read to its end, whoever gives it",
        "        if self._most_bytes is None:",
        "        if self:",
        "tests/unit/node_agent/test_peer_documents.py::test_a_document_without_end_is_not_read_to_its_end[plain]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/layout_form.py",
        "a layout has no more chunks than files",
        "_ENTRY_BYTES + _NAME_BYTES * chunk_count(size) for",
        "size and 1 for",
        "tests/unit/node_agent/test_peer_documents.py::test_the_longest_layout_of_its_contents_is_shorter_than_may_be",
    ),
    Breakage(
        "network",
        "bdn/wire/grants.py",
        "a key is believed whatever its name",
        '            if key["kid"] != ',
        '            if False and key["kid"] != ',
        _HEARTBEAT,
    ),
    Breakage(
        "network",
        "bdn/net/client/mirror_client.py",
        "a manifest is not compared with its name as it comes",
        "if (actual := digest_of(content)) != digest:",
        "if (actual := digest_of(content)) == 0:",
        f"{_TEST}test_a_manifest_with_a_wrong_bit_is_an_error",
    ),
    Breakage(
        "network",
        "bdn/net/client/mirror_client.py",
        "a damaged layout is nobody's error",
        "            raise WrongDocumentError(name, self.address, str(error)) from error\n        if layout.manifest",
        "            raise LookupError(name) from error\n        if layout.manifest",
        f"{_TEST}test_a_layout_with_a_wrong_bit_is_an_error_or_fails_one_stage_with_one",
    ),
]
