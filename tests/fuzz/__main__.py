"""``python -m tests.fuzz NAME --seconds N [--seed S]``: searches one target for inputs that it cannot bear, guided by coverage.

A finding is written to ``tests/fuzz/findings/NAME-…``, from where the ordinary tests replay it ever after. One process, because
the fuzzer (atheris, over libFuzzer) ends its own: exit status 0 when nothing was found.
"""

import argparse
import resource
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["bdn", "node_agent"]):
    from tests.fuzz.targets import TARGETS

FINDINGS = Path(__file__).parent / "findings"
LONGEST_INPUT = 100_000
LONGEST_SECONDS = 10  # for one input
MOST_MIB = 1024


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    target = TARGETS[given.target]

    def one_input(content: bytes) -> None:
        with suppress(*target.errors):
            target.run(content)

    with tempfile.TemporaryDirectory() as corpus:
        for number, seed in enumerate(target.seeds):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        FINDINGS.mkdir(exist_ok=True)
        options = [
            f"-max_total_time={given.seconds}", f"-seed={given.seed}", f"-max_len={LONGEST_INPUT}",
            f"-timeout={LONGEST_SECONDS}",
            "-rss_limit_mb=0",  # it would count what the program that started this one has had
            f"-artifact_prefix={FINDINGS}/{target.name}-", "-print_final_stats=1", corpus,
        ]  # fmt: skip
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_MIB << 20, MOST_MIB << 20))
        atheris.Setup([sys.argv[0], *options], one_input)
        atheris.Fuzz()


main()
