"""Each program starts with the hard limit of descriptors as its own."""

import subprocess
import sys

PROGRAM = """
import resource
from bdn.net.host_lookups import run_program
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 96))
async def limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)
print(*run_program(limits()))
"""


def test_a_program__has_the_hard_limit_of_descriptors() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert ended.stdout.split() == ["96", "96"]
