"""A job that writes checkpoints in all ways in which jobs do, and knows each state of them in which nobody wrote.

Nothing here depends on how fast it is: a checkpoint that is not whole has another name, is open for writing, says so, or lacks a shard.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from bdn.core.chunk import CHUNK_SIZE
from bdn.disk.durable import opened, write_all

State = dict[str, bytes]
_MOST: Final = 4  # checkpoints; then the oldest goes
_OPEN: Final = ".bdn-open"
_INDEX: Final = "model.safetensors.index.json"


@dataclass
class WritingJob:
    """``folder`` is where it writes. ``states`` are those of each name; ``current`` is what lies there."""

    random: Random
    folder: Path = Path()
    states: dict[str, list[State]] = field(default_factory=dict)
    current: dict[str, State] = field(default_factory=dict)
    number: int = 0
    kept: frozenset[str] = frozenset()  # pushed in the one version that there was of them

    def begin(self, folder: Path) -> None:
        """In an empty folder; names that an earlier run has used come again."""
        self.folder, self.current = folder, {}
        self.number = max(0, self.number - self.random.randrange(3))

    def act(self) -> None:
        """Do the next thing. Raises ``OSError``."""
        if len(self.current) >= _MOST:
            self._rotate()
        fresh: list[Callable[[], None]] = [self._aside, self._open, self._marked, self._indexed]
        again: list[Callable[[], None]] = [self._overwrite, self._replace, self._rename] if self.current else []
        self.random.choice(fresh + again)()

    # --- new ones ---

    def _aside(self) -> None:
        name, state = self._new()
        aside = self.folder / f"tmp-{name}"
        self._write_all(aside, state)
        self._settle(name, state)
        aside.rename(self.folder / name)

    def _open(self) -> None:
        """One of its files is open until all are there."""
        name, state = self._new()
        first, *others = state
        with opened(self._place(name, first), os.O_WRONLY | os.O_CREAT) as descriptor:
            self._write_all(self.folder / name, {path: state[path] for path in others})
            write_all(descriptor, memoryview(state[first]), 0)
            self._settle(name, state)

    def _marked(self) -> None:
        name, state = self._new()
        mark = self._place(name, _OPEN)
        mark.touch()
        self._write_all(self.folder / name, state)
        self._settle(name, state)
        mark.unlink()

    def _indexed(self) -> None:
        """The index comes first, and names what is still to come."""
        name, _ = self._new()
        shards = [f"model-{number}-of-3.safetensors" for number in (1, 2, 3)]
        index = json.dumps({"weight_map": {f"layer.{shard}": shard for shard in shards}}).encode()
        state = {_INDEX: index} | {shard: self._content() for shard in shards}
        for path, content in state.items():
            with opened(self._place(name, path), os.O_WRONLY | os.O_CREAT) as descriptor:
                write_all(descriptor, memoryview(content), 0)
                if path == shards[-1]:
                    self._settle(name, state)

    # --- those that there are ---

    def _overwrite(self) -> None:
        name = self.random.choice(list(self.current))
        state = self.current[name] | {"trainer_state.json": self._content(), self.random.choice("abc"): self._content()}
        mark = self._place(name, _OPEN)
        mark.touch()
        for path, content in state.items():
            if content != self.current[name].get(path):
                self._place(name, path).write_bytes(content)
        self._settle(name, state)
        mark.unlink()

    def _replace(self) -> None:
        """One file, by another that is renamed onto it."""
        name = self.random.choice(list(self.current))
        path, content = self.random.choice([*self.current[name], "new"]), self._content()
        if path != _INDEX:
            aside = self._place("tmp-file", "content")
            aside.write_bytes(content)
            self._settle(name, self.current[name] | {path: content})
            aside.rename(self.folder / name / path)

    def _rename(self) -> None:
        name = self.random.choice(list(self.current))
        other = f"{name}-best"
        if other not in self.current:
            self._settle(other, self.current.pop(name))
            (self.folder / name).rename(self.folder / other)

    def _rotate(self) -> None:
        """What is pushed is deleted file by file; else it is put aside first, for a part of it is nobody's checkpoint."""
        name = next(iter(self.current))
        del self.current[name]
        if name in self.kept and len(self.states[name]) == 1:
            shutil.rmtree(self.folder / name)
        else:
            aside = self.folder / f"tmp-gone-{self.random.getrandbits(64)}"
            (self.folder / name).rename(aside)
            shutil.rmtree(aside)

    # --- parts of these ---

    def _new(self) -> tuple[str, State]:
        """A name that nothing has now, and what is to be in it."""
        while (name := f"checkpoint-{self.number}") in self.current or f"{name}-best" in self.current:
            self.number += 1
        self.number += 1
        return name, {"model.safetensors": self._content(), "config.json": name.encode(), "deep/er/x": self._content()}

    def _content(self) -> bytes:
        is_large = self.random.random() < 0.03
        return self.random.randbytes(CHUNK_SIZE + 5 if is_large else self.random.randint(1, 100_000))

    def _settle(self, name: str, state: State) -> None:
        """What it will be with the next step."""
        self.states.setdefault(name, []).append(state)
        self.current[name] = state

    def _place(self, name: str, path: str) -> Path:
        place = self.folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _write_all(self, root: Path, state: State) -> None:
        for path, content in state.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)
