"""``python -m tests.support.network.silent_resolver FILE MODULE``: a program for which the name ``the-mirror`` never resolves.

FILE appears when it has asked. Its thread then waits in a call that nothing ends, as one in ``getaddrinfo`` does.
"""

import runpy
import socket
import sys
from pathlib import Path
from threading import Event
from typing import Any, Final

SILENT: Final = "the-mirror"


def main() -> None:
    asked, module = Path(sys.argv[1]), sys.argv[2]
    system = socket.getaddrinfo

    def resolve(host: Any, *given: Any, **named: Any) -> Any:
        if host in (SILENT, SILENT.encode()):
            asked.touch()
            Event().wait()
        return system(host, *given, **named)

    socket.getaddrinfo = resolve
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
