"""Ways to be hurt by input."""

from __future__ import annotations

from typing import Final

from tests.support.promise_breakages import Breakage

_PARSERS: Final = "tests/promises/test_hostile_parsers.py"
_SERVICES: Final = "tests/promises/test_hostile_services.py"
_UPSTREAMS: Final = "tests/promises/test_hostile_upstreams.py"
_LISTED: Final = f"{_UPSTREAMS}::test_a_listing_is_files_that_can_exist_or_an_error_that_says_what_is_wrong"
_SUSPICIONS: Final = "tests/promises/test_hostile_suspicions.py"
_NODE: Final = "tests/promises/test_corruption_on_the_node.py"
_LOOP: Final = f"{_NODE}::test_a_link_to_itself_in_a_view_is_damage_and_what_stands_beside_it_is_looked_at"
_READS: Final = f"{_PARSERS}::test_a_parser_reads_its_valid_forms_and_answers_everything_else_with_its_own_errors"

BREAKAGES: Final = [
    Breakage(
        "hostile-input",
        "bdn/wire/descriptor_shortage.py",
        "each place of the backlog is told of",
        "if (now := time.monotonic()) - told_at >= _AGAIN_SECONDS:",
        "if now := time.monotonic():",
        "tests/promises/test_hostile_clients.py::test_more_clients_than_descriptors_wait_and_the_log_stays_small[mirror]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/retry_after.py",
        "a day of no calendar ends the copy",
        "except (ValueError, OverflowError):",
        "except ValueError:",
        f"{_READS}[retry-after]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/retry_after.py",
        "white space of Unicode goes before a number",
        'r"[ \\t]*[0-9]{1,9}[ \\t]*"',
        'r"\\s*[0-9]{1,9}\\s*"',
        f"{_PARSERS}::test_what_was_found_once_is_borne_now",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/layout_form.py",
        "a layout nested without end is followed",
        "AttributeError, RecursionError)",
        "AttributeError)",
        f"{_READS}[layout]",
    ),
    Breakage(
        "hostile-input",
        "bdn/core/manifest.py",
        "a manifest nested without end is followed",
        "(KeyError, TypeError, ValueError, RecursionError)",
        "(KeyError, TypeError, ValueError)",
        f"{_READS}[manifest]",
    ),
    Breakage(
        "hostile-input",
        "bdn/core/source/paths.py",
        "a path may leave its folder",
        'if ".." in segments:',
        'if ".." == path:',
        f"{_READS}[path]",
    ),
    Breakage(
        "hostile-input",
        "bdn/core/source/weights.py",
        "a mount may leave its folder",
        'or ".." in location.split("/")',
        'or ".." == location',
        f"{_READS}[mount]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/ranges.py",
        "a range reaches past the end",
        "stop = min(size, int(match[2]) + 1) if match[2] else size",
        "stop = int(match[2]) + 1 if match[2] else size",
        f"{_READS}[range]",
    ),
    Breakage(
        "hostile-input",
        "bdn/sources/aws/listing.py",
        "a listing that is no XML is followed",
        "except ET.ParseError:",
        "except KeyError:",
        f"{_READS}[s3-listing]",
    ),
    Breakage(
        "hostile-input",
        "bdn/mirror/api/contents.py",
        "a malformed digest is a bug of ours",
        "    except ValueError as error:\n        raise InvalidRequestError(str(error)) from error\n",
        "    except KeyError as error:\n        raise InvalidRequestError(str(error)) from error\n",
        f"{_SERVICES}::test_the_mirror_answers_whatever_its_own_description_makes_up[off]",
    ),
    Breakage(
        "hostile-input",
        "bdn/mirror/api/contents.py",
        "readers who suspect hold the threads that they wait for",
        "await service.shelf.opened(asked)",
        "await asyncio.to_thread(service.shelf.open_chunk, asked)",
        f"{_SUSPICIONS}::test_many_who_suspect_at_once_are_answered_as_one_is",
    ),
    Breakage(
        "hostile-input",
        "bdn/mirror/shelf.py",
        "an examination that takes long is a bug of ours",
        "        except TimeoutError:\n",
        "        except KeyError:\n",
        f"{_SUSPICIONS}::test_an_examination_that_takes_too_long_is_a_chunk_that_cannot_be_had_now",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/service.py",
        "half a surrogate pair is text",
        "        dependencies=[Depends(_check_text)],\n",
        "",
        f"{_SERVICES}::test_the_mirror_answers_whatever_its_own_description_makes_up[off]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/service.py",
        "half a surrogate pair is text in a body of UTF-16",
        "|\\x00",
        "",
        "tests/unit/wire/test_service_text.py::test_half_a_surrogate_pair_is_refused_however_it_is_written[utf-16]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/collection_schema.py",
        "who asks for a source without end is told to come again later",
        "    source: Annotated[StrictStr, Field(max_length=LONGEST_SOURCE)] | None = None\n",
        "    source: StrictStr | None = None\n",
        f"{_SERVICES}::test_the_mirror_answers_whatever_its_own_description_makes_up[off]",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/verification_schema.py",
        "a path to verify may hold a NUL",
        ', pattern=r"^[^\\x00]*$")',
        ")",
        f"{_SERVICES}::test_the_agent_answers_whatever_its_own_description_makes_up",
    ),
    Breakage(
        "hostile-input",
        "node_agent/scrub/staged_files.py",
        "a path that leads to itself is a bug of ours",
        "return Path(os.path.realpath(path))",
        "return path.resolve()",
        f"{_SERVICES}::test_the_agent_answers_whatever_its_own_description_makes_up",
        also=(_LOOP,),
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/http_server.py",
        "who says half a request holds a connection for ever",
        "        http=ImpatientProtocol,\n",
        "",
        "tests/unit/wire/test_impatience.py",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/chunk_server/head.py",
        "a head may have any number of headers",
        "if len(lines) > HEADERS_LIMIT + 1:",
        "if False:",
        "tests/unit/wire/test_chunk_head.py",
    ),
    Breakage(
        "hostile-input",
        "bdn/core/source/patterns.py",
        "a pattern may be as long as the request",
        "if len(pattern) > LENGTH_LIMIT:",
        "if False:",
        "tests/unit/core/test_patterns.py",
    ),
    Breakage(
        "hostile-input",
        "bdn/wire/weights_schema.py",
        "a mirror may have any number of sources",
        "if len(bodies) > SOURCES_LIMIT:",
        "if False:",
        "tests/unit/wire/test_weights_schema.py",
    ),
    Breakage(
        "hostile-input",
        "bdn/sources/hub/tree.py",
        "the SDK's word is taken for an entry",
        "tuple(_file(entry) for",
        "tuple(RepoFile(**entry) for",
        f"{_LISTED}[hf://o/m]",
    ),
    Breakage(
        "hostile-input",
        "bdn/sources/hub/tree.py",
        "a hub's page may come after itself for ever",
        "if following == address:",
        "if False:",
        "tests/unit/sources/test_hub_tree.py",
    ),
    Breakage(
        "hostile-input",
        "bdn/sources/google/bucket.py",
        "a size is what int() makes of it",
        'if not re.fullmatch(r"[0-9]{1,30}", text):',
        "if False:",
        f"{_LISTED}[gs://bucket]",
    ),
    Breakage(
        "hostile-input",
        "bdn/sources/aws/listing.py",
        "an object may have less than no bytes",
        "if not _SIZE.fullmatch(text):",
        "if False:",
        "tests/unit/sources/test_s3_listing.py",
    ),
    Breakage(
        "hostile-input",
        "bdn/mirror/mirroring/selecting.py",
        "a listing is read to its end, wherever that is",
        "if len(listed) > self.limit_files:",
        "if len(listed) > 2 * self.limit_files:",
        f"{_UPSTREAMS}::test_a_listing_that_never_ends_is_left_at_the_limit[gs://bucket]",
    ),
]
