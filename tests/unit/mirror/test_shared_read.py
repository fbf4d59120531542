"""One look for all who ask the same at about the same time: as fresh as each of them needs it, and no fresher."""

import asyncio

import pytest

from bdn.mirror.waiting import SharedRead, SharedReads


class Sight:
    """Numbers its looks. Each takes ``seconds`` of a clock that nothing else moves, and fails when it is told so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0
        self.seconds = 0.0
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.looks += 1
        number = self.looks
        for _ in range(3):  # others come meanwhile
            await asyncio.sleep(0)
        self.now += self.seconds
        if self.error is not None:
            raise self.error
        return number


def shared(sight: Sight, seconds: float = 0.5) -> SharedRead[int]:
    return SharedRead(sight, seconds, lambda: sight.now)


async def asked_by(count: int, look: SharedRead[int], sight: Sight, *, anew: bool = False) -> list[int | BaseException]:
    """What so many are answered: the first one before all others, who come while he looks."""
    first = asyncio.create_task(look.get(anew=anew))
    await asyncio.sleep(0)
    sight.now += 0.001
    return await asyncio.gather(first, *(look.get(anew=anew) for _ in range(count - 1)), return_exceptions=True)


async def test_what_was_seen_lately_is_given_until_it_is_too_old() -> None:
    sight = Sight()
    look = shared(sight)
    assert await look.get() == 1
    sight.now = 0.5
    assert await look.get() == 1
    sight.now = 0.6
    assert await look.get() == 2


async def test_who_heard_of_a_change_is_given_no_look_that_began_before() -> None:
    sight = Sight()
    look = shared(sight)
    assert await look.get() == 1
    sight.now = 0.1
    assert await look.get(anew=True) == 2


@pytest.mark.promise("load")
@pytest.mark.parametrize("anew", [False, True], ids=["lately", "anew"])
@pytest.mark.parametrize("seconds", [0.0, 10.0], ids=["at once", "slowly"])
async def test_a_hundred_who_ask_at_once_cost_two_looks_however_long_one_takes(seconds: float, anew: bool) -> None:
    sight = Sight()
    sight.seconds = seconds
    seen = await asked_by(100, shared(sight), sight, anew=anew)
    second = 2 if seconds or anew else 1  # a look that began before they came, and is not old
    assert seen == [1] + [second] * 99
    assert sight.looks == second


@pytest.mark.promise("load")
async def test_a_hundred_who_ask_at_once_are_told_the_error_of_two_looks() -> None:
    sight = Sight()
    sight.error = LookupError("away")
    look = shared(sight)
    assert {str(error) for error in await asked_by(100, look, sight)} == {"away"}
    assert sight.looks == 2
    sight.error, sight.now = None, 0.002
    assert await look.get() == 3


async def test_what_changed_while_one_looked_is_seen_by_who_asks_afterwards() -> None:
    sight = Sight()
    look = shared(sight)
    first = asyncio.create_task(look.get())
    await asyncio.sleep(0)
    look.forget()
    assert await first == 1
    assert await look.get() == 2


async def test_who_leaves_while_he_looks_leaves_it_to_the_next() -> None:
    sight = Sight()
    look = shared(sight)
    first, second = (asyncio.create_task(look.get()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == 2


async def test_each_question_has_its_own_look_for_as_long_as_somebody_asks() -> None:
    sights = {"a": Sight(), "b": Sight()}
    looks = SharedReads[str, int](0.0)
    with looks.of("a", sights["a"]) as first, looks.of("a", sights["a"]) as same, looks.of("b", sights["b"]) as other:
        assert first is same
        assert other is not first
        assert len(looks) == 2
        await other.get()
    assert not len(looks)
    assert (sights["a"].looks, sights["b"].looks) == (0, 1)
