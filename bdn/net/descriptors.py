"""The limit of open files of this process: each connection takes a descriptor, and a file that is sent on it another one."""

import contextlib
import resource
from typing import Final

_MOST_CONNECTIONS: Final = 4096
_LEAST_CONNECTIONS: Final = 16
_SPARE: Final = 256  # descriptors for files, databases and logs
_MOST: Final = 1024**2  # a limit of a billion, as some container runtimes set it, makes programs that scan all slow


def raise_descriptor_limit() -> int:
    """Raise the soft limit as far as the hard one allows; a login shell's soft limit is 1,024. Returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox refuses setrlimit: the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """The soft limit now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def connection_limit() -> int:
    """Connections that one server of this process may hold: API and data port have half of all descriptors each, a socket and a file for each connection."""
    return min(_MOST_CONNECTIONS, max(_LEAST_CONNECTIONS, (descriptor_limit() - _SPARE) // 4))
