"""An index that a job wrote to hurt whoever parses it: it says nothing, and costs little memory. Measured in a process of its own."""

import subprocess
import sys

import pytest

from bdn.core.training.checkpoints import LONGEST_READ, MOST_ELEMENTS, shards_of

MOST_GROWTH = 256  # MiB, of which the index itself is not a part
PROGRAM = """
import re, resource, sys
from bdn.core.training.checkpoints import shards_of

head, unit, tail, size = (part.encode() for part in sys.argv[1:5])
content = head + unit * ((int(size) - len(head) - len(tail)) // len(unit)) + tail
before = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
assert shards_of(content) == set(), "it names shards"
most = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])  # ru_maxrss may be that of the process that forked
print((most * 1024 - before) // 1024**2)
"""
HOSTILE = {
    "lists": ('{"weight_map":[', "[],", "0]}"),
    "numbers": ('{"weight_map":[', "1,", "1]}"),
    "objects": ('{"weight_map":[', '{"":0},', "0]}"),
    "names": ('{"weight_map":{', '"a":"b",', '"c":0}}'),
    "nested lists": ('{"weight_map":', "[", ""),
    "escapes": ('{"weight_map":["', r"\u00e9", '"]}'),
    "one wide name": ('{"weight_map":["\U0001f600', "a", '"]}'),
    "backslashes": ('{"weight_map":["', r"\\", '"]}'),
}


@pytest.mark.parametrize("size", [LONGEST_READ, 64 * 1024**2], ids=["the longest that is read", "64 MiB"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_shards_of__hostile_index__is_refused_in_little_memory(kind: str, size: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *HOSTILE[kind], str(size)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert int(run.stdout) <= MOST_GROWTH


def test_shards_of__index_of_the_largest_models__is_read() -> None:
    shards = {f"model-{number:05}-of-00163.safetensors" for number in range(163)}
    names = sorted(shards)
    entries = ",".join(
        f'"model.layers.{number // 384}.mlp.experts.{number % 384}.down_proj.weight": "{names[number % 163]}"'
        for number in range(150_000)
    )
    assert MOST_ELEMENTS > 150_000
    assert shards_of(f'{{"metadata": {{}}, "weight_map": {{{entries}}}}}'.encode()) == shards
