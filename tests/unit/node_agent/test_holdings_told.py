"""What a heartbeat says of holdings, against a mirror that does as the contract says."""

from dataclasses import dataclass, field

from bdn.wire.heartbeat_schema import HoldingsChange
from bdn.wire.mirror_schema import Holding
from node_agent.mirror_link.heartbeats import HoldingsTold
from tests.fakes.recorded_holdings import RecordedHoldings

PLENTY = 1_000_000


def holding(number: int, size: int = 5) -> Holding:
    return Holding(manifest=f"b3:{number:064x}", bytes=size)


@dataclass
class Mirror(RecordedHoldings):
    """Counts what it is told."""

    told: list[int] = field(default_factory=list)

    def hear(self, change: HoldingsChange | None) -> str:
        if change is not None:
            self.told.append(len(change.held) + len(change.gone))
        return self.record(change)


@dataclass
class Agent:
    mirror: Mirror
    held: list[Holding] = field(default_factory=list)
    version: int = 1
    beats: int = 0
    told: HoldingsTold = field(default_factory=HoldingsTold)

    def hold(self, *held: Holding) -> None:
        self.held, self.version = list(held), self.version + 1

    def beat(self, most_bytes: int = PLENTY) -> bool:
        """One heartbeat; whether another is to follow at once."""
        self.beats += 1
        number = self.beats
        telling = self.told.next(self.held, self.version, most_bytes) if self.version != self.told.version else None
        return self.told.heard(telling, number, self.mirror.hear(telling.change if telling else None))

    def settle(self, most_bytes: int = PLENTY) -> int:
        """Beat while there is more to say; how many heartbeats that were."""
        before = self.beats
        while self.beat(most_bytes):
            assert self.beats - before < 1000
        assert self.mirror.held == {one.manifest: one for one in self.held}
        return self.beats - before


def test_only_what_changed_is_told() -> None:
    agent = Agent(Mirror(), [holding(number) for number in range(100)])
    agent.settle()
    agent.hold(*agent.held[1:], holding(7, size=6))
    agent.held.pop(6)
    agent.settle()
    agent.settle()
    assert agent.mirror.told == [100, 2]


def test_an_agent_that_starts_again_tells_nothing_that_the_mirror_has() -> None:
    mirror, held = Mirror(), [holding(number) for number in range(3)]
    Agent(mirror, held).settle()
    Agent(mirror, held[::-1]).settle()
    assert mirror.told == [3]
    Agent(mirror, held[1:]).settle()
    assert mirror.told == [3, 2]  # it does not know what the mirror has, but that it is something else


def test_what_is_too_much_for_one_heartbeat_comes_in_pieces() -> None:
    agent = Agent(Mirror(), [holding(number) for number in range(20)])
    agent.settle(most_bytes=3 * len(holding(0).model_dump_json()))
    assert agent.mirror.told == [3] * 6 + [2]
    agent.hold()
    agent.settle(most_bytes=1)
    assert agent.mirror.told[7:] == [1] * 20


def test_a_mirror_that_was_set_back_is_told_all_again_with_the_next_heartbeat() -> None:
    agent = Agent(Mirror(), [holding(1), holding(2)])
    agent.settle()
    digest, held = agent.mirror.digest, dict(agent.mirror.held)
    agent.hold(*agent.held, holding(3))
    agent.settle()
    agent.mirror.digest, agent.mirror.held = digest, held
    assert not agent.beat()  # two agents of one name would else tell all to each other for ever
    agent.settle()
    assert agent.mirror.told == [2, 1, 3]


def test_an_answer_that_was_overtaken_says_nothing() -> None:
    agent = Agent(Mirror(), [holding(1)])
    agent.settle()
    agent.beats += 1
    late, digest = agent.beats, agent.mirror.digest
    agent.hold(holding(2))
    agent.settle()
    assert not agent.told.heard(None, late, digest)
    agent.settle()
    assert agent.mirror.told == [1, 2]


def test_of_two_heartbeats_at_once_one_is_taken_up_and_nothing_is_told_twice() -> None:
    agent = Agent(Mirror(), [holding(1)])
    agent.settle()
    agent.hold(holding(1), holding(2))
    one, other = (agent.told.next(agent.held, agent.version, PLENTY) for _ in range(2))
    digests = [agent.mirror.hear(None if telling is None else telling.change) for telling in (one, other)]
    for number, (telling, digest) in enumerate(zip((other, one), digests[::-1], strict=True)):
        agent.told.heard(telling, agent.beats + 2 - number, digest)
    agent.beats += 2
    agent.settle()
    assert agent.mirror.told == [1, 1, 1]
