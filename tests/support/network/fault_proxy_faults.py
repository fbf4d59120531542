"""What a network can do to one answer. Each is played by ``FaultProxy`` for one exchange."""

import asyncio
from collections.abc import Callable
from typing import Final

from tests.support.network.fault_proxy import Exchange, Fault, Message, parted, passes

TRICKLE: Final = 1024  # bytes a second


async def resets_at_once(exchange: Exchange) -> bool:
    """The request is read, and the connection reset."""
    exchange.reset()
    return False


async def resets_in_the_middle(exchange: Exchange) -> bool:
    """Half of the answer's body, and a reset."""
    await exchange.send(half(await exchange.perform()))
    exchange.reset()
    return False


async def ends_in_the_middle(exchange: Exchange) -> bool:
    """Half of the body that ``Content-Length`` promised, and an orderly end."""
    await exchange.send(half(await exchange.perform()))
    return False


async def ends_at_once(exchange: Exchange) -> bool:
    """An end instead of an answer."""
    await exchange.perform()
    return False


async def falls_silent(exchange: Exchange) -> bool:
    """The request arrives; the answer is lost, and nobody ends the connection: one way of a partition, or half-open."""
    await exchange.perform()
    await exchange.until_gone()
    return False


async def stalls_in_the_middle(exchange: Exchange) -> bool:
    """Half of the body, and then silence."""
    await exchange.send(half(await exchange.perform()))
    await exchange.until_gone()
    return False


async def trickles(exchange: Exchange) -> bool:
    """The head, and then 1 KiB a second."""
    answer = await exchange.perform()
    await exchange.send(answer.head)
    for start in range(0, len(answer.body), TRICKLE // 8):
        await exchange.send(answer.body[start : start + TRICKLE // 8])
        if start + TRICKLE // 8 < len(answer.body):
            await asyncio.sleep(1 / 8)
    return True


async def drips(exchange: Exchange) -> bool:
    """The head, and then a byte now and then: sooner than any wait for a next byte ends."""
    answer = await exchange.perform()
    await exchange.send(answer.head)
    for byte in answer.body:
        await exchange.send(bytes([byte]))
        await asyncio.sleep(0.2)
    return True


async def flips_a_bit(exchange: Exchange) -> bool:
    """One bit of the body is wrong; checksums of TCP did not notice."""
    answer = await exchange.perform()
    body = bytearray(answer.body)
    if body:
        body[len(body) // 2] ^= 1
    await exchange.send(answer.head + bytes(body))
    return True


async def repeats_the_answer(exchange: Exchange) -> bool:
    """The same answer twice: the second is there when the connection's next request is sent."""
    answer = await exchange.perform()
    await exchange.send(answer.whole * 2)
    return True


async def repeats_the_request(exchange: Exchange) -> bool:
    """The other side hears it twice, and its second answer is the one that comes back."""
    await exchange.perform()
    return await passes(exchange)


async def answers_busy(exchange: Exchange) -> bool:
    """Something on the way says 503, in words of its own."""
    body = b"<html>upstream connect error or disconnect/reset before headers</html>"
    head = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(body)
    await exchange.send(head + body)
    return True


def later(seconds: float) -> Fault:
    """The connection is served late."""

    async def is_late(exchange: Exchange) -> bool:
        await asyncio.sleep(seconds)
        return await passes(exchange)

    return is_late


def half(answer: Message) -> bytes:
    return answer.whole[: len(answer.head) + len(answer.body) // 2]


PASSING: Final[tuple[Fault, ...]] = (
    resets_at_once,
    resets_in_the_middle,
    ends_in_the_middle,
    ends_at_once,
    falls_silent,
    stalls_in_the_middle,
    trickles,
    flips_a_bit,
    repeats_the_answer,
    repeats_the_request,
    answers_busy,
)
# After these no answer comes at all, or none that counts, however often it is asked for.
LASTING: Final[tuple[Fault, ...]] = (resets_at_once, ends_in_the_middle, falls_silent, answers_busy, parted)


def name_of(fault: Callable[..., object]) -> str:
    """For test ids."""
    return getattr(fault, "__name__", str(fault))
