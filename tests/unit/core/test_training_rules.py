"""What a checkpoint is, of what type, in which order, and what says that more of it will come."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdn.core.training.checkpoints import by_number, describe, is_looked_at, place_of, shards_of
from bdn.core.training.settling import Stamp, why_incomplete

ADAPTER = {"base_model_name_or_path": "org/base", "r": 8}
WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}

# Trees as libraries write them: ``save_pretrained`` in one and in two shards, ``Trainer``, PEFT, and ``torch.distributed.checkpoint``.
ONE = ["config.json", "generation_config.json", "model.safetensors"]
SHARDED = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
]
TRAINER = [*ONE, "optimizer.pt", "rng_state.pth", "scheduler.pt", "trainer_state.json", "training_args.bin"]
PEFT = ["README.md", "adapter_config.json", "adapter_model.safetensors"]
DCP = [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("checkpoint-100", True),
        ("model.safetensors", True),
        ("tmp", True),
        ("x.tmp-1", True),
        ("tmp-checkpoint-100", False),
        ("checkpoint-100.tmp", False),
        (".staging", False),
    ],
)
def test_temporary_and_hidden_names_are_not_looked_at(name: str, is_one: bool) -> None:
    assert is_looked_at(name) is is_one


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("checkpoint-1/model.safetensors", ("checkpoint-1", "model.safetensors")),
        ("checkpoint-1/.metadata", ("checkpoint-1", ".metadata")),
        ("checkpoint-1/tmp-x/a.tmp", ("checkpoint-1", "tmp-x/a.tmp")),
        ("model.pt", (".", "model.pt")),
        (".hidden", None),
        ("tmp-1/model.pt", None),
    ],
)
def test_a_file_belongs_to_the_folder_directly_below_or_to_the_checkpoint_of_loose_files(path: str, place: Any) -> None:
    assert place_of(path) == place


@pytest.mark.parametrize(
    ("paths", "read", "kind"),
    [
        (ONE, {"config.json": {"model_type": "llama"}}, "full"),
        (SHARDED, {"config.json": {}}, "full"),
        (TRAINER, {"config.json": WHISPER}, "whisper"),
        (["model.safetensors"], {}, "full"),
        (["config.json"], {}, "full"),
        (DCP, {}, "other"),
        (["model.pt"], {}, "other"),
        ([*PEFT, *ONE], {"adapter_config.json": ADAPTER, "config.json": WHISPER}, "lora"),
    ],
)
def test_the_type_follows_from_names_and_configurations(paths: list[str], read: dict[str, Any], kind: str) -> None:
    found = describe(paths, {name: json.dumps(content).encode() for name, content in read.items()})

    assert found.type == kind


def test_an_adapter_tells_its_configuration_and_its_base() -> None:
    found = describe(PEFT, {"adapter_config.json": json.dumps(ADAPTER).encode()})

    assert (found.base_model, found.lora_adapter_config) == ("org/base", ADAPTER)


WRONG = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{",
    b"[" * 100_000,
    b'{"base_model_name_or_path": "a\\u0000b"}',
    b'{"base_model_name_or_path": "\\ud800"}',
    b'{"r": NaN}',
    b'{"r": -Infinity}',
    b'{"r": 1e999}',
    b'{"r": %b}' % (b"1" * 5000),
]


@pytest.mark.parametrize("content", WRONG, ids=range(len(WRONG)))
def test_what_is_no_json_that_can_be_written_down_says_nothing(content: bytes) -> None:
    found = describe(PEFT, {"adapter_config.json": content})

    assert (found.type, found.base_model, found.lora_adapter_config) == ("lora", None, None)
    assert describe(ONE, {"config.json": content}).type == "full"
    assert shards_of(content) == set()


@pytest.mark.parametrize("base", [7, None, ["org/base"], "x" * 5000])
def test_a_base_that_is_no_name_is_none(base: object) -> None:
    content = json.dumps({"base_model_name_or_path": base}).encode()

    assert describe(PEFT, {"adapter_config.json": content}).base_model is None


@given(
    content=st.binary() | st.recursive(st.none() | st.text() | st.floats(), st.lists).map(json.dumps).map(str.encode)
)
def test_no_content_is_an_error(content: bytes) -> None:
    describe(PEFT, {"adapter_config.json": content})
    describe(ONE, {"config.json": content})
    shards_of(content)


def test_numbers_in_names_are_compared_as_numbers() -> None:
    names = ["checkpoint-1000", "checkpoint-900", "checkpoint-900-b2", "checkpoint-900-b10", "checkpoint", "."]

    assert sorted(names, key=by_number) == [
        ".",
        "checkpoint",
        "checkpoint-900",
        "checkpoint-900-b2",
        "checkpoint-900-b10",
        "checkpoint-1000",
    ]


@given(prefix=st.text("ab-²٣", max_size=3), numbers=st.lists(st.integers(0, 10**30), max_size=5))
def test_names_that_differ_in_a_number_are_in_the_order_of_numbers(prefix: str, numbers: list[int]) -> None:
    found = sorted((f"{prefix}-{number}" for number in numbers), key=by_number)

    assert found == [f"{prefix}-{number}" for number in sorted(numbers)]


@given(names=st.lists(st.text("a01-²٣", max_size=6), unique=True), data=st.data())
def test_the_order_does_not_depend_on_the_order_before(names: list[str], data: st.DataObject) -> None:
    """``checkpoint-1`` and ``checkpoint-01`` are not equal, either."""
    assert sorted(data.draw(st.permutations(names)), key=by_number) == sorted(names, key=by_number)


def index(*shards: object) -> bytes:
    return json.dumps({"weight_map": {f"layer.{number}": shard for number, shard in enumerate(shards)}}).encode()


def test_an_index_names_shards_and_no_file_that_cannot_be() -> None:
    named = index("a.safetensors", "./b.safetensors", "a.safetensors", 7, "../c", "/d", "", "e\\f")

    assert shards_of(named) == {"a.safetensors", "b.safetensors"}


def stamps(*paths: str) -> dict[str, Stamp]:
    return {path: Stamp(1, 2, 3, number, 5) for number, path in enumerate(paths)}


def test_what_is_nested_deeper_than_anybody_writes_is_no_configuration() -> None:
    for depth, is_kept in ((50, True), (300, False)):
        content = b'{"a":' * depth + b"1" + b"}" * depth
        assert (
            describe(["adapter_config.json"], {"adapter_config.json": content}).lora_adapter_config is not None
        ) == is_kept


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "indexes", "writing", "why"),
    [
        (["a"], {}, set(), None),
        (["a", ".bdn-open"], {}, set(), "it holds .bdn-open"),
        (["a", "sub/.bdn-open"], {}, set(), None),
        ([INDEX, "a"], {INDEX: index("a")}, set(), None),
        ([INDEX, "a"], {INDEX: index("a", "c", "b")}, set(), f"{INDEX} names b, which is not there"),
        ([INDEX], {INDEX: None}, set(), f"{INDEX} cannot be read"),
        ([f"sub/{INDEX}", "a"], {f"sub/{INDEX}": index("a")}, set(), f"sub/{INDEX} names sub/a, which is not there"),
        ([f"sub/{INDEX}", "sub/a"], {f"sub/{INDEX}": index("a")}, set(), None),
        (["a", "b"], {}, {(5, 1)}, "b is open for writing"),
        (["a", "b"], {}, {(5, 2), (6, 1)}, None),
    ],
)
def test_a_checkpoint_is_incomplete_while_something_says_so(
    files: list[str], indexes: dict[str, bytes | None], writing: set[tuple[int, int]], why: str | None
) -> None:
    assert why_incomplete(stamps(*files), indexes.get, lambda: writing) == why
