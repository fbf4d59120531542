"""Whatever bytes come, a parser reads them or says which typed error they are: nothing else, and soon."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz.mutation import all_of
from tests.fuzz.targets import TARGETS, Target
from tests.support.promises.tally import Scale, Tally

pytestmark = pytest.mark.promise("hostile-input")

ROOT = Path(__file__).parents[2]
FINDINGS = sorted((ROOT / "tests/fuzz/findings").glob("*-*"))
LONGEST_SECONDS = 20  # for one input; most take microseconds


class HangError(BaseException):
    """One input took too long."""


@contextmanager
def limited() -> Iterator[None]:
    def over(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(LONGEST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(target: Target, content: bytes) -> str | None:
    """What is wrong with what the target did, if anything."""
    try:
        with limited():
            target.run(content)
    except target.errors:
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]} for {content[:200]!r} ({len(content)} bytes)"
    return None


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_parser_reads_its_valid_forms_and_answers_everything_else_with_its_own_errors(
    name: str, tally: Tally, scale: Scale
) -> None:
    target = TARGETS[name]
    wrong: list[str] = []
    for content in all_of(target.seeds, scale.of(120, 1_500)):
        tally.add(scenarios=1)
        if (problem := outcome(target, content)) is not None:
            wrong.append(problem)
    tally.add(wrong=len(wrong))
    assert wrong[:3] == []


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_the_first_form_of_each_parser_is_read(name: str) -> None:
    TARGETS[name].run(TARGETS[name].seeds[0])


@pytest.mark.parametrize("piece", [":", "://", "s3://", "://:", "://@", "@", "/", "gs://a:"])
def test_a_source_of_two_million_signs_is_refused_soon(piece: str, tally: Tally) -> None:
    """A mirror has one loop for everybody: a text whose signs are looked at once for each other one would stop it for hours."""
    tally.add(scenarios=1, refused=1)
    assert outcome(TARGETS["source"], piece.encode() * (2_000_000 // len(piece))) is None


@pytest.mark.parametrize("finding", [pytest.param(path, id=path.name) for path in FINDINGS])
def test_what_was_found_once_is_borne_now(finding: Path, tally: Tally) -> None:
    name = re.split(r"-(?:crash|timeout|oom|leak)-", finding.name)[0]
    tally.add(scenarios=1)
    assert outcome(TARGETS[name], finding.read_bytes()) is None


@pytest.mark.skipif(os.environ.get("BDN_FAULT") != "full", reason="make fault searches; make test replays")
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_search_guided_by_coverage_finds_nothing(name: str, tally: Tally) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, "--seconds", "3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", result.stderr)
    assert executed, result.stderr[-3000:]
    assert int(executed[1]) > 100
    tally.add(scenarios=int(executed[1]))
