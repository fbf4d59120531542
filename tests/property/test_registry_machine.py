"""The rules of ``bdn/mirror/db/chunks.py`` over rows alone: whatever is slow, dies or fails, no object is without a row, and none is missing.

Time is a number. A request to the store may land at any time before its bound, or never; who sent it need not live that long.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import StaticPool, create_engine, delete

from bdn.core.chunk import Digest
from bdn.mirror.db import chunks
from bdn.mirror.db.chunks import ChunkState, SetEndedError, SetState, StoredChunk
from bdn.mirror.db.tables import Base, ChunkRow, ChunkSetRow, SetChunkRow
from tests.support.content.names import named
from tests.support.promises.tally import at_scale

STEPS: Final = 50
EXAMPLES: Final = at_scale(40, 2_000)
# One for all examples: statements are compiled once.
ENGINE: Final = create_engine("sqlite://", poolclass=StaticPool, connect_args={"check_same_thread": False})
DIGESTS: Final = [named(f"chunk {number}") for number in range(3)]
pytestmark = pytest.mark.promise("collection")
WORKERS: Final = [f"mir_{number}/0" for number in range(3)]

workers = st.sampled_from(WORKERS)
some = st.frozensets(st.sampled_from(DIGESTS), min_size=1)


@pytest.fixture(scope="module", autouse=True)
def tables() -> Iterator[None]:
    Base.metadata.create_all(ENGINE)
    yield
    Base.metadata.drop_all(ENGINE)


@dataclass
class Worker:
    """A mirror or a push, also one that does not know yet that its set has ended."""

    set_id: int
    wanted: dict[Digest, float] = field(default_factory=dict)  # to be put, and when they were acquired
    put: set[Digest] = field(default_factory=set)

    @property
    def is_done(self) -> bool:
        return not self.wanted and not self.put


@dataclass
class Collector:
    """``taken`` are chunks of whose DELETE it waits for the answer; ``gone`` those whose rows it is about to delete."""

    taken: list[StoredChunk] = field(default_factory=list)
    since: float = 0.0
    gone: list[tuple[list[StoredChunk], float]] = field(default_factory=list)


@dataclass(frozen=True)
class Request:
    """A PUT or DELETE that got no answer."""

    is_put: bool
    digest: Digest
    bound: float


class RegistryMachine(RuleBasedStateMachine):
    @initialize(has_late_puts=st.booleans())
    def build(self, has_late_puts: bool) -> None:
        """With late PUTs, as in a bucket, no collection takes a stored chunk before the last PUT of it has ended."""
        with ENGINE.begin() as connection:
            for table in (SetChunkRow, ChunkSetRow, ChunkRow):
                connection.execute(delete(table))
        self.has_late_puts = has_late_puts
        self.now = 1e6
        self.objects: set[Digest] = set()
        self.harmed: set[Digest] = set()  # the disk lost them, and they were not put again
        self.late: list[Request] = []
        self.workers: dict[str, Worker] = {}
        self.zombies: list[Worker] = []  # whose sets were ended behind their back
        self.published: list[int] = []
        self.collectors = [Collector(), Collector()]

    # --- mirrors and pushes ---

    @rule(owner=workers, digests=some)
    def acquire(self, owner: str, digests: frozenset[Digest]) -> None:
        with ENGINE.begin() as connection:
            worker = self.workers.setdefault(owner, Worker(chunks.begin(connection, owner)))
            found = chunks.acquire(connection, worker.set_id, dict.fromkeys(digests, 1), self.now)
        assert found.stored | found.put | found.leaving == digests
        worker.wanted |= dict.fromkeys(found.put, self.now)
        worker.put -= found.put

    @rule(owner=workers, digests=some)
    def mirror_at_once(self, owner: str, digests: frozenset[Digest]) -> None:
        self.acquire(owner, digests)
        self._put(self.workers[owner])
        self._mark(self.workers[owner])
        self.publish(owner)

    @rule(owner=workers, digests=some)
    def hold(self, owner: str, digests: frozenset[Digest]) -> None:
        with ENGINE.begin() as connection:
            worker = self.workers.setdefault(owner, Worker(chunks.begin(connection, owner)))
            held = chunks.hold(connection, worker.set_id, digests)
        assert held.keys() <= self.objects | self.harmed

    @rule(owner=workers, digests=some)
    def keep_only(self, owner: str, digests: frozenset[Digest]) -> None:
        if worker := self.workers.get(owner):
            with ENGINE.begin() as connection:
                chunks.keep_only(connection, worker.set_id, digests, self.now)
            worker.wanted = {digest: at for digest, at in worker.wanted.items() if digest in digests}
            worker.put &= digests

    @rule(owner=workers)
    def put(self, owner: str) -> None:
        if worker := self.workers.get(owner):
            self._put(worker)

    @rule(owner=workers)
    def put_without_an_answer(self, owner: str) -> None:
        if self.has_late_puts and (worker := self.workers.get(owner)):
            self.late += [Request(True, digest, at + chunks.PUT_SECONDS) for digest, at in worker.wanted.items()]

    @rule(owner=workers)
    def mark_stored(self, owner: str) -> None:
        if worker := self.workers.get(owner):
            self._mark(worker)

    @rule(owner=workers)
    def publish(self, owner: str) -> None:
        worker = self.workers.get(owner)
        if worker and worker.is_done:
            with ENGINE.begin() as connection:
                chunks.publish(connection, worker.set_id)
            self.published.append(worker.set_id)
            del self.workers[owner]

    @rule(owner=workers)
    def crash_and_resume(self, owner: str) -> None:
        """The next process acquires anew whatever the last one had not published."""
        if self.workers.pop(owner, None):
            with ENGINE.begin() as connection:
                wanted = chunks.names(connection, chunks.begin(connection, owner))
            if wanted:
                self.acquire(owner, frozenset(wanted))

    @rule(owner=workers, is_known=st.booleans(), is_prompt=st.booleans(), is_apart=st.booleans())
    def fail(self, owner: str, is_known: bool, is_prompt: bool, is_apart: bool) -> None:
        """Unless it ``is_known`` to the worker, it goes on."""
        if worker := self.workers.pop(owner, None):
            with ENGINE.begin() as connection:
                chunks.end_of(connection, owner.partition("/")[0], self._grace_begins(is_prompt))
            if not is_known:
                self.zombies = [worker, *self.zombies][:2]
        if is_apart:
            self.take_apart()

    @rule()
    def zombie_acquires(self) -> None:
        for zombie in self.zombies:
            with pytest.raises(SetEndedError), ENGINE.begin() as connection:
                chunks.acquire(connection, zombie.set_id, dict.fromkeys(DIGESTS, 1), self.now)
            with pytest.raises(SetEndedError), ENGINE.begin() as connection:
                chunks.publish(connection, zombie.set_id)

    @rule()
    def zombie_puts(self) -> None:
        """Its PUT is bounded as any other."""
        for zombie in self.zombies:
            self._put(zombie)

    @rule()
    def zombie_marks(self) -> None:
        for zombie in self.zombies:
            self._mark(zombie)

    def _grace_begins(self, is_prompt: bool) -> float:
        return chunks.NO_GRACE if is_prompt and not self.has_late_puts else self.now

    def _put(self, worker: Worker) -> None:
        for digest, at in worker.wanted.items():
            if self.now < at + chunks.PUT_SECONDS and (self.has_late_puts or worker not in self.zombies):
                self._land(Request(True, digest, self.now))
                worker.put.add(digest)
        worker.wanted = {digest: at for digest, at in worker.wanted.items() if digest not in worker.put}

    def _mark(self, worker: Worker) -> None:
        try:
            with ENGINE.begin() as connection:
                chunks.acquire(connection, worker.set_id, {}, self.now, worker.put)
        except SetEndedError:
            assert worker in self.zombies
        worker.put.clear()

    # --- what ends and is collected ---

    @rule(number=st.integers(0, 3), is_prompt=st.booleans(), is_apart=st.booleans())
    def evict(self, number: int, is_prompt: bool, is_apart: bool) -> None:
        if self.published:
            with ENGINE.begin() as connection:
                chunks.end(
                    connection, [self.published.pop(number % len(self.published))], self._grace_begins(is_prompt)
                )
        if is_apart:
            self.take_apart()

    @rule()
    def take_apart(self) -> None:
        with ENGINE.begin() as connection:
            while chunks.take_apart(connection):
                pass

    @rule()
    def take_a_step_apart(self) -> None:
        with ENGINE.begin() as connection:
            chunks.take_apart(connection)

    @rule(which=st.integers(0, 1), is_prompt=st.booleans(), limit=st.sampled_from([1, 500]))
    def collect(self, which: int, is_prompt: bool, limit: int) -> None:
        """It is in no hurry to delete. What it took before and did not delete is forgotten, as when it dies."""
        coming = {request.digest for request in self.late if request.is_put}
        coming |= {digest for zombie in self.zombies for digest in zombie.wanted}
        with ENGINE.begin() as connection:
            has_grace = not is_prompt or (self.has_late_puts and chunks.stored(connection, coming))
            grace = chunks.PUT_SECONDS if has_grace else 0.0
            self.collectors[which].taken = chunks.collect(connection, grace, self.now, limit)
        self.collectors[which].since = self.now

    @rule(which=st.integers(0, 1), is_late=st.booleans(), is_forgotten=st.booleans())
    def delete(self, which: int, is_late: bool, is_forgotten: bool) -> None:
        collector = self.collectors[which]
        if self.now < (bound := collector.since + chunks.DELETE_SECONDS):
            for chunk in collector.taken:
                self._send(Request(False, chunk.digest, bound), is_late=is_late)
            if not is_late:
                collector.gone.append((collector.taken, collector.since))
        collector.taken = []
        if is_forgotten:
            self.forget(which)

    @rule(which=st.integers(0, 1))
    def forget(self, which: int) -> None:
        collector = self.collectors[which]
        with ENGINE.begin() as connection:
            for gone, since in collector.gone:
                chunks.forget(connection, gone, since)
        collector.gone = []

    @rule(which=st.integers(0, 1), owner=workers, digests=some, is_prompt=st.booleans())
    def acquire_what_is_leaving(self, which: int, owner: str, digests: frozenset[Digest], is_prompt: bool) -> None:
        self.give_everything_up(is_prompt)
        self.wait(chunks.PUT_SECONDS, True)
        self.collect(which, True, 500)
        self.acquire(owner, digests)

    @rule(digests=some, is_late=st.booleans(), is_anew=st.booleans())
    def writer_outlives_its_set(self, digests: frozenset[Digest], is_late: bool, is_anew: bool) -> None:
        """Its PUT or its word that they are stored comes when others collected its chunks, or wrote them anew."""
        self.give_everything_up(False)
        self.acquire(WORKERS[0], digests)
        if is_late:
            self.put_without_an_answer(WORKERS[0])
        else:
            self.put(WORKERS[0])
        self.give_everything_up(False)
        if not is_late:
            self.wait(chunks.PUT_SECONDS, True)
        self.collect_at_once(0)
        if is_anew:
            self.acquire(WORKERS[1], digests)
        self.zombie_marks()
        if is_late:
            self.land_late(0)

    @rule(digests=some, seconds=st.sampled_from([600.0, chunks.DELETE_SECONDS]), is_landing=st.booleans())
    def delete_outlives_its_collection(self, digests: frozenset[Digest], seconds: float, is_landing: bool) -> None:
        """It has no answer, or its collector is slow to say that the row may go; meanwhile another one deletes, too."""
        self.mirror_at_once(WORKERS[2], digests)
        self.give_everything_up(False)
        self.wait(chunks.PUT_SECONDS, True)
        self.collect(0, True, 500)
        self.delete(0, is_late=is_landing, is_forgotten=False)
        self.wait(seconds, False)
        self.collect(1, True, 500)
        self.delete(1, is_late=not is_landing, is_forgotten=True)
        self.forget(0)
        self.mirror_at_once(WORKERS[2], digests)
        self.land_late(0)

    @rule(is_prompt=st.booleans())
    def give_everything_up(self, is_prompt: bool) -> None:
        for owner in WORKERS:
            self.fail(owner, False, is_prompt, False)
        while self.published:
            self.evict(0, is_prompt, False)
        self.take_apart()

    @rule(which=st.integers(0, 1))
    def collect_at_once(self, which: int) -> None:
        self.take_apart()
        self.collect(which, True, 500)
        self.delete(which, is_late=False, is_forgotten=True)

    # --- the world ---

    @rule(digest=st.sampled_from(DIGESTS), is_noticed=st.booleans())
    def damage(self, digest: Digest, is_noticed: bool) -> None:
        if digest in self.objects:
            self.objects.remove(digest)
            self.harmed.add(digest)
        if is_noticed and digest in self.harmed:
            with ENGINE.begin() as connection:
                if chunks.mark_damaged(connection, digest, "absent", self.now):
                    self.harmed.remove(digest)

    @rule(number=st.integers(0, 7))
    def land_late(self, number: int) -> None:
        if self.late:
            self._land(self.late.pop(number % len(self.late)))

    @rule(seconds=st.sampled_from([1.0, 600.0, chunks.DELETE_SECONDS, chunks.PUT_SECONDS]), is_landing=st.booleans())
    def wait(self, seconds: float, is_landing: bool) -> None:
        """What has to land before then lands, or never does."""
        self.now += seconds
        due = [request for request in self.late if request.bound <= self.now]
        self.late = [request for request in self.late if request.bound > self.now]
        for request in due if is_landing else ():
            self._land(request)

    def _send(self, request: Request, *, is_late: bool) -> None:
        if is_late:
            self.late.append(request)
        else:
            self._land(request)

    def _land(self, request: Request) -> None:
        if request.is_put:
            self.objects.add(request.digest)
            self.harmed.discard(request.digest)
        else:
            self.objects.discard(request.digest)

    # --- what holds ---

    @invariant()
    def no_object_is_without_a_row_and_none_is_missing(self) -> None:
        """And publishing, which looked at its set alone, named nothing that was not put: only a scrub makes such a chunk unstored."""
        if not hasattr(self, "objects"):
            return
        with ENGINE.connect() as connection:
            rows = connection.exec_driver_sql("SELECT id, digest, state, refs, damage FROM chunks").all()
            sets = connection.exec_driver_sql(
                "SELECT chunk_id, state FROM set_chunks JOIN chunk_sets ON id = set_id"
            ).all()
        named: dict[int, list[str]] = {row[0]: [] for row in rows}
        for chunk, state in sets:
            named[chunk].append(state)  # with a row for each
        assert self.objects <= {Digest.from_bytes(row[1]) for row in rows}, "an object has no row"
        for chunk, raw, state, refs, damage in rows:
            assert refs == len(named[chunk]), "references are counted wrong"
            assert not (state == ChunkState.LEAVING and refs), "a chunk that is leaving is referred to"
            if state == ChunkState.STORED and {SetState.FILLING, SetState.PUBLISHED} & {*named[chunk]}:
                assert Digest.from_bytes(raw) in self.objects | self.harmed, "an object that is named is missing"
            if SetState.PUBLISHED in named[chunk]:
                assert state == ChunkState.STORED or damage, "a manifest names what was not put"


TestRegistryMachine = RegistryMachine.TestCase
TestRegistryMachine.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None)
