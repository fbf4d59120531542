"""What makes nonsense from a client, or from an upstream, more than a refusal."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_CLIENTS: Final = "tests/promises/test_hostile_clients.py"
_NONSENSE: Final = f"{_CLIENTS}::test_nonsense_is_refused_on_every_port_and_costs_nothing"
_PARSERS: Final = "tests/promises/test_hostile_upstreams.py"
_SERVICES: Final = "tests/promises/test_hostile_clients.py"
_UPSTREAMS: Final = "tests/promises/test_hostile_upstreams.py"

BREAKAGES: Final = [
    Breakage(
        "hostile-input",
        "bdn/core/source/weights.py",
        "each colon of a source is looked at as if it were the first",
        "://[^/@:]*:",
        "://[^/@]*:.*@",
        f"{_PARSERS}::test_a_source_of_two_million_signs_is_refused_soon[gs://a:]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/http_fields.py",
        "a path that names no chunk is a bug of ours",
        "    except ValueError:\n        return None\n",
        "    except KeyError:\n        return None\n",
        f"{_NONSENSE}[mirror]",
        also=(f"{_NONSENSE}[agent]",),
    ),
    Breakage(
        "hostile-input",
        "bdn/net/chunk_server/server.py",
        "a client that says half a head keeps a thread",
        "        connection.setblocking(False)\n",
        "        connection.setblocking(True)\n",
        f"{_CLIENTS}::test_a_hundred_clients_that_never_end_their_heads_delay_nobody_and_are_hung_up_on[agent]",
    ),
    Breakage(
        "hostile-input",
        "bdn/net/chunk_server/messages.py",
        "a header's value may hold no space",
        "[^\\x00-\\x08\\x0a-\\x1f\\x7f]",
        "[^\\x00-\\x08\\x0a-\\x20\\x7f]",
        f"{_PARSERS}::test_the_first_form_of_each_parser_is_read[request-head]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/http_fields.py",
        "no bytes are a range, too",
        "    if start >= stop:\n",
        "    if start > stop:\n",
        f"{_PARSERS}::test_a_search_guided_by_coverage_finds_nothing[range]",
        is_full=True,
    ),
    Breakage(
        "hostile-input",
        "node_agent/api.py",
        "the events of a stage that nobody knows begin",
        "    found = agent.stages.registry.find(stage_id)  # a refusal has to come before the stream has begun\n"
        "    return EventStream(agent.stages.follow(found.record.id, 1.0)",
        "    return EventStream(agent.stages.follow(stage_id, 1.0)",
        f"{_SERVICES}::test_the_agent_answers_whatever_its_own_description_makes_up",
    ),
    Breakage(
        "hostile-input",
        "bdn/sources/huggingface/errors.py",
        "what a hub cannot have meant is no error of the hub's",
        "    TypeError,\n    ValueError,\n)",
        "    TypeError,\n)",
        f"{_UPSTREAMS}::test_a_listing_that_comes_back_to_itself_ends[hf://o/m]",
    ),
    Breakage(
        "hostile-input",
        "bdn/mirror/ingest/survey.py",
        "the limit of bytes counts files",
        "sum(file.size for file in files)",
        "sum(1 for file in files)",
        f"{_UPSTREAMS}::test_one_huge_entry_is_refused[a petabyte-s3://bucket]",
    ),
]
