"""Ways to break what listeners of events that do not read may cost, and the test that notices each."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TEST = "tests/unit/net/test_event_stream.py::"

BREAKAGES: Final = [
    Breakage(
        "hostile-input",
        "bdn/net/api_server/event_stream.py",
        "what is under way for a client that leaves is canceled again and again",
        "        with single_error():\n",
        "        return await super().__call__(scope, receive, send)\n        with single_error():\n",
        f"{_TEST}test_what_is_under_way_for_a_listener_that_leaves_ends_in_order",
    ),
    Breakage(
        "hostile-input",
        "bdn/net/api_server/event_stream.py",
        "who has left is told on and on",
        "            await super().stream_response(send)\n",
        '            await __import__("asyncio").shield(super().stream_response(send))\n',
        f"{_TEST}test_a_listener_that_leaves_while_it_is_held_up_ends_the_stream_and_is_no_error",
    ),
    Breakage(
        "hostile-input",
        "bdn/net/api_server/http_server.py",
        "a client that does not read puts a traceback into the log of a service that stops",
        "contextlib.suppress(asyncio.CancelledError)",
        "contextlib.suppress(ZeroDivisionError)",
        f"{_TEST}test_a_service_that_stops_lets_go_of_who_is_held_up_without_a_traceback",
    ),
]
