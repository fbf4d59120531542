"""A task group that fails raises one error."""

import asyncio

import pytest

from bdn.core.errors import BdnError, NotFoundError, StoreUnavailableError, single_error

CHUNK = NotFoundError("chunk")
STORE = StoreUnavailableError("refused")


def leave(error: BaseException | None) -> None:
    with single_error():
        if error:
            raise error


async def fail_together(*errors: BdnError) -> None:
    async def fail(error: BdnError) -> None:
        raise error

    with single_error():
        async with asyncio.TaskGroup() as group:
            for error in errors:
                group.create_task(fail(error))


async def test_the_first_failure_of_a_task_group_leaves_it_alone() -> None:
    with pytest.raises(NotFoundError) as caught:
        await fail_together(CHUNK, STORE)
    assert caught.value is CHUNK


def test_the_cause_of_the_failure_is_kept() -> None:
    failure = StoreUnavailableError("refused")
    failure.__cause__ = ConnectionError("refused")
    with pytest.raises(StoreUnavailableError) as caught:
        leave(ExceptionGroup("group", [failure]))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_an_error_by_itself_or_deep_inside_groups_leaves_them_alone_and_success_passes() -> None:
    leave(None)
    for error in (CHUNK, BaseExceptionGroup("outer", [ExceptionGroup("inner", [CHUNK]), STORE])):
        with pytest.raises(NotFoundError) as caught:
            leave(error)
        assert caught.value is CHUNK
