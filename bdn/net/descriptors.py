"""This process's limit of open files: each connection uses a descriptor, and a file sent on it another one."""

import contextlib
import resource
from typing import Final

_MOST_CONNECTIONS: Final = 4096
_LEAST_CONNECTIONS: Final = 16
_SPARE: Final = 256  # descriptors for files, databases and logs
_MOST: Final = 1024**2  # some container runtimes set a billion, which slows programs that scan all descriptors


def raise_descriptor_limit() -> int:
    """Raise the soft limit toward the hard limit; login shells have 1,024. Returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may refuse setrlimit: the limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def connection_limit() -> int:
    """The limit of connections per server of this process.

    API and data port get half of all descriptors each, two per connection: a socket and a file.
    """
    return min(_MOST_CONNECTIONS, max(_LEAST_CONNECTIONS, (descriptor_limit() - _SPARE) // 4))
