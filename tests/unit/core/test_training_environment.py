"""The environment of a rank, and the places of its directories."""

from typing import Final

import pytest

from bdn.core.errors import InvalidMountError
from bdn.core.training.environment import JobPlaces, RankOf, check_places, environment, ignored, is_variable

RANK: Final = RankOf("j" * 10, "job-1", "p" * 10, "llama 3", rank=1, group_size=2, gpus=8, leader="10.0.0.1")
ALL: Final = JobPlaces(checkpoints="/mnt/ckpts", loaded="/tmp/loaded", caches="/root/.cache", huggingface=True)
ALWAYS: Final = {
    "BT_TRAINING_JOB_ID": "j" * 10,
    "BT_TRAINING_JOB_NAME": "job-1",
    "BT_TRAINING_PROJECT_ID": "p" * 10,
    "BT_TRAINING_PROJECT_NAME": "llama 3",
    "BT_SCRATCH_DIR": "/mnt/bt-scratch",
    "BT_NUM_GPUS": "8",
    "BT_GROUP_SIZE": "2",
    "BT_NODE_RANK": "1",
    "BT_LEADER_ADDR": "10.0.0.1",
    "BT_RETRY_COUNT": "0",
}


def test_environment__has_what_is_always_there_and_what_was_requested() -> None:
    assert environment(RANK, JobPlaces(working=None), {}, {}) == ALWAYS
    assert environment(RANK, ALL, {}, {}) == ALWAYS | {
        "BT_WORKING_DIR": "/b10/workspace",
        "BT_CHECKPOINT_DIR": "/mnt/ckpts",
        "BT_LOAD_CHECKPOINT_DIR": "/tmp/loaded",
        "BT_PROJECT_CACHE_DIR": "/root/.cache/user_artifacts",
        "BT_RW_CACHE_DIR": "/root/.cache/user_artifacts",
        "BT_TEAM_CACHE_DIR": "/root/.cache/team_artifacts",
    }


VALUES: Final = [
    ("$BT_PROJECT_CACHE_DIR/huggingface", "/root/.cache/user_artifacts/huggingface"),
    ("${BT_NODE_RANK}of$BT_GROUP_SIZE", "1of2"),
    ("$HOME/x $BT_UNKNOWN ${BT_NODE_RANK", "$HOME/x $BT_UNKNOWN ${BT_NODE_RANK"),
    ("$(reboot) `reboot` \\$x", "$(reboot) `reboot` \\$x"),
    ("$$BT_NODE_RANK", "$1"),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_environment__replaces_our_variables_in_plain_values_alone(value: str, expected: str) -> None:
    made = environment(RANK, ALL, {"PLAIN": value}, {"SECRET": value})
    assert (made["PLAIN"], made["SECRET"]) == (expected, value)


def test_environment__ours_cannot_be_set() -> None:
    given = {"BT_NODE_RANK": "7", "BT_OTHER": "x", "BTX": "y"}
    made = environment(RANK, ALL, given, {"BT_SECRET": "z"})
    assert (made["BT_NODE_RANK"], made["BTX"]) == ("1", "y")
    assert not {"BT_OTHER", "BT_SECRET"} & made.keys()
    assert ignored(given) == ["BT_NODE_RANK", "BT_OTHER"]


@pytest.mark.parametrize(
    ("name", "accepted"), [("HF_HOME", True), ("_x1", True), ("1x", False), ("a-b", False), ("", False)]
)
def test_is_variable(name: str, accepted: bool) -> None:
    assert is_variable(name) is accepted


@pytest.mark.parametrize("mounts", [["/app/model"], ["/tmp/x", "/root/y"], ["/mnt/weights"]])
def test_check_places__accepts(mounts: list[str]) -> None:
    check_places(ALL, mounts)


@pytest.mark.parametrize(
    "mount",
    [
        *("/b10", "/b10/run", "/mnt/bt-scratch/x", "/proc", "/sys/x", "/dev/shm", "/mnt", "/mnt/ckpts", "/mnt/ckpts/x"),
        *("/tmp/loaded/rank-0", "/root/.cache/user_artifacts", "/root/.cache/huggingface/hub", "/root/.cache", "/root"),
        "/app/x:ro",
    ],
)
def test_check_places__refuses_what_is_ours_or_inside_another(mount: str) -> None:
    with pytest.raises(InvalidMountError):
        check_places(ALL, ["/data", mount])


def test_check_places__refuses_requested_places_with_a_colon() -> None:
    for places in (JobPlaces(checkpoints="/a:b"), JobPlaces(loaded="/a:b"), JobPlaces(caches="/a:b")):
        with pytest.raises(InvalidMountError):
            check_places(places, [])
