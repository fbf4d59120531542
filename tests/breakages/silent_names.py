"""What lets a name that hangs hold more than those who ask for it; each is noticed."""

from __future__ import annotations

from typing import Final

from tests.support.promises.breakages import Breakage

_TESTS: Final = "tests/promises/test_network_names.py"
_GOES_ON: Final = f"{_TESTS}::test_an_agent_goes_on_while_the_name_of_its_mirror_hangs"
_BYTES: Final = f"{_TESTS}::test_byte_threads_get_free_of_a_name_that_hangs_and_share_its_thread"
_ENDS: Final = f"{_TESTS}::test_an_agent_ends_while_the_name_of_its_mirror_hangs"

BREAKAGES: Final = [
    Breakage(
        "network",
        "bdn/net/host_lookups.py",
        "names are asked for in the default executor",
        "return await HOST_LOOKUPS.find_soon(Question(host, port, family, type, proto, flags))",
        "return await super().getaddrinfo(host, port, family=family, type=type, proto=proto, flags=flags)",
        _GOES_ON,
        also=(_ENDS,),
    ),
    Breakage(
        "network",
        "node_agent/__main__.py",
        "the agent runs on asyncio's own loop",
        "run_program(serve(settings))",
        "__import__('asyncio').run(serve(settings))",
        _ENDS,
    ),
    Breakage(
        "network",
        "bdn/net/host_lookups.py",
        "a program that ends waits for the resolver",
        "daemon=True",
        "daemon=False",
        _ENDS,
    ),
    Breakage(
        "network",
        "bdn/net/host_lookups.py",
        "whoever asks gets a thread",
        "            if question not in self._waiting:\n                self._begin(question)\n",
        "            self._begin(question)\n",
        _GOES_ON,
        also=(f"{_BYTES}[ours]",),
    ),
    Breakage(
        "network",
        "bdn/net/host_lookups.py",
        "a byte thread waits for as long as the name hangs",
        "if not wait([answer], longest).done:",
        "if not wait([answer], 40).done:",
        f"{_BYTES}[ours]",
        also=(f"{_BYTES}[upstreams]",),
    ),
    Breakage(
        "network",
        "bdn/net/host_lookups.py",
        "a name that has hung once hangs for good",
        "tuple(self._waiting.pop(question))",
        "tuple(self._waiting[question])",
        _GOES_ON,
        also=(f"{_BYTES}[upstreams]",),
    ),
]
