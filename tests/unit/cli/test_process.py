"""What the process of a service does with its memory."""

import subprocess
import sys

# Of 300 MB in blocks of 100 KB every eighth stays, so that what is free lies between what is used.
_PROGRAM = """
from pathlib import Path
from bdn.disk.syscalls import trim_heaps
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 // 1000**2
held = [bytes([1]) * 100_000 for _ in range(3000)]
del held[1::2], held[1::2], held[1::2]
full = resident()
trim_heaps()
print(full, resident())
"""


def test_memory_that_was_freed_between_what_is_used_goes_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    before, after = map(int, said.stdout.split())
    assert before > 300
    assert after < before / 2
