"""What is missing of checkpoints, by the rules of their own formats, and which ones a job resumes from."""

import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.training.checkpoints import CheckpointType, is_loadable
from bdn.core.training.wholeness import why_not_whole


def tensors(size: int = 40, **more: object) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}, **more}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size)


def archive(comment: bytes = b"") -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)
        file.comment = comment
    return written.getvalue()


def why(files: Mapping[str, bytes], *, is_first_rank: bool = True) -> str | None:
    return why_not_whole(
        {path: len(content) for path, content in files.items()},
        lambda path, start, stop: files[path][start:stop],
        is_first_rank=is_first_rank,
    )


DCP = {"__0_0.distcp": b"x", "__1_0.distcp": b"x"}


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"log.txt": b"", "events.out.tfevents.1": b"x"},
        {**DCP, ".metadata": b"x"},
        {f"optimizer/{path}": b"x" for path in (*DCP, ".metadata")},
        {"model.safetensors": tensors()},
        {"model.safetensors": tensors(__metadata__={"a": '"data_offsets":[0,99999]'})},
        {"model.safetensors": struct.pack("<Q", 2) + b"{}"},
        {"model.safetensors": b"not of this format at all"},
        {"model.safetensors": struct.pack("<Q", 2**63) + b"{"},
        {"model.safetensors": struct.pack("<Q", 3) + b"abc"},
        {"optimizer.pt": archive(), "a.ckpt": archive(b"PK\x05\x06 a comment")},
        {"pytorch_model.bin": b"\x80\x02 a pickle of torch before 1.6"},
        {"adapter_config.json": b"{}", "adapter_model.safetensors": tensors()},
        {"adapter_config.json": b"{}", "adapter_model-00001-of-00002.bin": archive()},
        {"latest": b"global_step5\n", "global_step5/mp_rank_00_model_states.pt": archive()},
        {"latest": b"epoch=3.ckpt", "epoch=3.ckpt": archive()},
        {"latest": b"2026-01-01 12:00"},
        {"latest": b"../../etc/passwd"},
        {"latest_checkpointed_iteration.txt": b"100", "iter_0000100/mp_rank_00/model_optim_rng.pt": archive()},
        {"latest_checkpointed_iteration.txt": b"release", "release/mp_rank_00/model_optim_rng.pt": archive()},
    ],
    ids=range(20),
)
def test_why_not_whole__whole_or_of_no_format__says_nothing(files: dict[str, bytes]) -> None:
    assert why(files) is None


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        (DCP, ".metadata is missing"),
        ({**DCP, ".metadata": b""}, ".metadata is missing"),
        ({f"optimizer/{path}": b"x" for path in DCP} | {".metadata": b"x"}, "optimizer/.metadata is missing"),
        ({"model.safetensors": b""}, "model.safetensors is empty"),
        ({"model.safetensors": tensors()[:5]}, "is cut off in its header"),
        ({"model.safetensors": tensors()[:30]}, "is cut off in its header"),
        ({"model.safetensors": bytes(4096)}, "is cut off in its header"),
        ({"a/model.safetensors": tensors()[:-1]}, "a/model.safetensors is cut off: it has"),
        ({"optimizer.pt": b""}, "optimizer.pt is empty"),
        ({"optimizer.pt": archive()[:-1]}, "optimizer.pt is cut off: it is a zip archive"),
        ({"a.ckpt": archive()[:2]}, "a.ckpt is cut off"),
        ({"adapter_config.json": b"{}", "README.md": b"x"}, "adapter_config.json has no adapter_model beside it"),
        ({"latest": b"global_step5"}, "latest names global_step5, which does not exist"),
        ({"latest": b"global_step5", "global_step5/log": b"x"}, "latest names global_step5, which holds no weights"),
        ({"latest_checkpointed_iteration.txt": b"7\n", "iter_0000006/a.pt": archive()}, "names iter_0000007"),
    ],
    ids=range(15),
)
def test_why_not_whole__cut_off_or_unfinished__names_what_is_missing(files: dict[str, bytes], missing: str) -> None:
    assert missing in (why(files) or "")


def test_why_not_whole__rank_beside_the_first__may_lack_what_the_first_writes() -> None:
    assert why(DCP, is_first_rank=False) is None


def test_why_not_whole__loose_marker__names_another_checkpoint() -> None:
    assert why_not_whole({"latest": 8}, lambda *_: b"step-500", is_loose=True) is None


def test_why_not_whole__file_that_cannot_be_read__is_not_whole() -> None:
    for path in ("a.safetensors", "a.pt"):
        assert why_not_whole({path: 100}, lambda *_: None) == f"{path} cannot be read"


def test_why_not_whole__header_of_many_windows__finds_the_last_tensor_across_their_borders() -> None:
    names = {f"layer.{index:05}": {"dtype": "U8", "data_offsets": [index, index + 1]} for index in range(60_000)}
    header = json.dumps(names).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(60_000)

    assert why({"a.safetensors": whole}) is None
    assert why({"a.safetensors": whole[:-1]}) is not None


def test_why_not_whole__garbage_of_a_hundred_megabytes_as_header__is_read_in_windows() -> None:
    size = 100_000_000

    def part(_: str, start: int, stop: int) -> bytes:
        assert stop - start <= 1024**2
        return (struct.pack("<Q", size) + b"{")[:stop] if not start else b"[" * (stop - start)

    tracemalloc.start()
    why_not_whole({"a.safetensors": 8 + size}, part)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 1024**2


@given(
    path=st.sampled_from(["a.safetensors", "a.pt", "latest", "latest_checkpointed_iteration.txt"]),
    content=st.binary(max_size=300) | st.binary(max_size=50).map(lambda tail: b"PK\x03\x04" + tail),
)
def test_why_not_whole__any_content__is_no_error(path: str, content: bytes) -> None:
    why({path: content})


@pytest.mark.parametrize(
    ("kind", "paths", "loadable"),
    [
        ("other", ["events.out.tfevents.1", "runs/x.log"], False),
        ("other", ["latest"], False),
        ("other", ["optimizer.pt", "rng_state_0.pth", "training_args.bin"], False),
        ("other", ["epoch=3.ckpt"], True),
        ("other", ["global_step5/mp_rank_00_model_states.pt"], True),
        ("other", ["__0_0.distcp", ".metadata"], True),
        ("other", ["__1_0.distcp"], False),
        ("full", ["config.json", "__1_0.distcp"], False),
        ("full", ["config.json"], True),
        ("lora", ["adapter_config.json"], True),
    ],
    ids=range(10),
)
def test_is_loadable__follows_from_type_and_names(kind: CheckpointType, paths: list[str], loadable: bool) -> None:
    assert is_loadable(kind, paths) == loadable
