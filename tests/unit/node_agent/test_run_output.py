"""Lines of a rank's output: cut, shown, sent once, bounded."""

import os
import re
from pathlib import Path

import pytest

from bdn.core.errors import LimitExceededError, NotFoundError
from bdn.mirror.db.training import pack
from bdn.wire.run_schema import LINES_AT_ONCE, LONGEST_LINE, RunOutput
from node_agent.run.directory import RunDirectory
from node_agent.run.output import OutputSender, cut, text_of


@pytest.mark.parametrize(("content", "lines", "rest"), [
    (b"", [], b""),
    (b"a\n\nb\n", [b"a", b"", b"b"], b""),
    (b"a\nb", [b"a"], b"b"),
    (b"x" * LONGEST_LINE + b"\n", [b"x" * LONGEST_LINE], b""),
    (b"x" * (LONGEST_LINE + 3) + b"\n", [b"x" * LONGEST_LINE, b"xxx"], b""),
    (b"x" + "ü".encode() * LONGEST_LINE, [b"x" + "ü".encode() * (LONGEST_LINE // 2 - 1)], None),  # between characters
    (b"\x80" * (LONGEST_LINE + 1), [b"\x80" * (LONGEST_LINE - 4)], b"\x80" * 5),  # no characters at all
])  # fmt: skip
def test_output_is_cut_into_lines_of_bounded_length(content: bytes, lines: list[bytes], rest: bytes | None) -> None:
    found, taken = cut(content, is_end=False)

    assert found[: len(lines)] == lines
    assert rest is None or content[taken:] == rest


def test_a_batch_ends_before_it_is_full_and_the_last_line_needs_no_newline() -> None:
    many, taken = cut(b"x\n" * 2 * LINES_AT_ONCE, is_end=True)
    assert (len(many), taken) == (LINES_AT_ONCE - 1, 2 * (LINES_AT_ONCE - 1))
    assert cut(b"a\nb", is_end=True) == ([b"a", b"b"], 3)


@pytest.mark.parametrize(("line", "text"), [
    (b"plain", "plain"),
    (b" 10%\r 50%\r100%", "100%"),
    (b"windows\r", "windows"),
    (b"half \xc3", "half \ufffd"),
    (b"nul \0", "nul \ufffd"),
])  # fmt: skip
def test_a_line_is_shown_as_in_a_terminal(line: bytes, text: str) -> None:
    assert text_of(line) == text


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run0000001-0")
    made.shared.mkdir(parents=True)
    return made


async def all_sent(sender: OutputSender) -> None:
    while await sender.send_next(is_end=True):
        pass


async def test_output_that_the_mirror_does_not_take__oldest_dropped_with_a_note_and_disk_freed(
    directory: RunDirectory,
) -> None:
    sent: list[RunOutput] = []

    async def send(output: RunOutput) -> None:
        sent.append(output)

    lines = [f"{number:0127}" for number in range(100_000)]
    directory.output.write_text("".join(f"{line}\n" for line in lines))
    sender = OutputSender(directory, send, most_bytes=6_400_000, log_bytes=1_280_000)
    await sender.bound()
    assert directory.output.stat().st_blocks * 512 < 3_000_000
    await all_sent(sender)

    texts = [text for output in sent for _, text in output.lines]
    count = int(texts[0].split()[3])
    assert texts[0] == f"bdn: at least {count} lines dropped here, because the mirror did not take them in time"
    assert texts[1:] == lines[count:]
    assert 80_000 < count < 99_000  # in pieces of 1 MiB
    assert directory.output.stat().st_blocks * 512 < 100_000
    assert [output.seq for output in sent] == list(range(len(sent)))


async def test_output_of_a_rank_that_ended__lines_for_which_its_log_has_no_room_are_not_sent(
    directory: RunDirectory,
) -> None:
    sent: list[RunOutput] = []

    async def send(output: RunOutput) -> None:
        sent.append(output)

    directory.output.write_text("y\n" * 1_000_000 + "last\n")
    sender = OutputSender(directory, send, log_bytes=20_000_000)
    await sender.bound()
    assert await sender.send_next(is_end=False)
    await sender.bound(is_end=True)
    await all_sent(sender)

    (first, *_), *later = (output.lines for output in sent)
    note, *texts = [text for lines in later for _, text in lines]
    count = int(re.findall(r"at least (\d+) lines dropped", note)[0])
    assert first[1] == "y"
    assert len(sent[0].lines) + count + len(texts) == 1_000_001
    assert texts == [*((len(texts) - 1) * ["y"]), "last"]
    _, size = pack([line for lines in later for line in lines])
    assert 10_000_000 < size < 20_000_000


async def test_sparse_output_of_terabytes__is_dropped_without_reading_it(directory: RunDirectory) -> None:
    sent: list[RunOutput] = []

    async def send(output: RunOutput) -> None:
        sent.append(output)

    with directory.output.open("wb") as file:
        file.truncate(4 * 1024**4)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\n")
    sender = OutputSender(directory, send, most_bytes=6_400_000, log_bytes=1_280_000)
    await sender.bound()
    await all_sent(sender)

    texts = [text for output in sent for _, text in output.lines]
    assert texts[0].startswith("bdn: at least 1 lines dropped here")
    assert texts[-1] == "last"
    assert len(texts) < 100


async def test_batch_that_is_too_large_for_the_mirror__is_sent_in_parts_under_numbers_without_gaps(
    directory: RunDirectory,
) -> None:
    sent: list[RunOutput] = []

    async def send(output: RunOutput) -> None:
        size = sum(len(text) for _, text in output.lines)
        if size > 200_000:
            raise LimitExceededError("bytes of a request", size, 200_000)
        sent.append(output)

    lines = [f"{number:0999}" for number in range(1000)]
    directory.output.write_text("".join(f"{line}\n" for line in lines))
    await all_sent(OutputSender(directory, send))

    assert [text for output in sent for _, text in output.lines] == lines
    assert [output.seq for output in sent] == list(range(len(sent)))


async def test_run_that_the_mirror_does_not_know__needs_no_output(directory: RunDirectory) -> None:
    async def send(_: RunOutput) -> None:
        raise NotFoundError("run")

    directory.output.write_text("line\n")
    sender = OutputSender(directory, send)
    await all_sent(sender)

    assert sender.is_refused


async def test_output_that_the_job_replaced_by_a_link__is_not_followed(directory: RunDirectory, tmp_path: Path) -> None:
    async def send(output: RunOutput) -> None:
        raise AssertionError(output)

    (tmp_path / "private").write_text("private\n")
    directory.output.symlink_to(tmp_path / "private")
    with pytest.raises(Exception, match="output"):
        await OutputSender(directory, send).send_next(is_end=True)
