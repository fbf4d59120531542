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

from bdn.core.chunk import CHUNK_SIZE, digest_of
from bdn.disk.durable import opened, write_all

Contents = dict[str, bytes]
State = dict[str, str]  # what each file's content is called
MOST: Final = 8  # checkpoints; then the oldest goes
_FILES: Final = 30  # of a checkpoint
_LEAST_BYTES: Final = 16  # a safetensors file of fewer than 8 is cut off
_MOST_BYTES: Final = 40_000  # of a file, but for large ones
_OPEN: Final = ".bdn-open"
_INDEX: Final = "model.safetensors.index.json"


@dataclass
class WritingJob:
    """``folder`` is where it writes. ``states`` are those of each name; ``current`` is what lies there.

    All large files begin with the same chunk, as those of models of which only a part is trained.
    """

    random: Random
    folder: Path = Path()
    states: dict[str, list[State]] = field(default_factory=dict)
    current: dict[str, State] = field(default_factory=dict)
    number: int = 0
    kept: frozenset[str] = frozenset()  # pushed in the one version that there was of them

    def __post_init__(self) -> None:
        self._base = self.random.randbytes(CHUNK_SIZE)

    def begin(self, folder: Path) -> None:
        """In an empty folder; names that an earlier run has used come again."""
        self.folder, self.current = folder, {}
        self.number = max(0, self.number - self.random.randrange(3))

    def write_large(self) -> None:
        """A checkpoint whose first file is a large one. Raises ``OSError``."""
        name, contents = self._new()
        contents = {path: self._large() if path == next(iter(contents)) else contents[path] for path in contents}
        self._write_aside(name, contents)

    def act(self) -> None:
        """Do the next thing. Raises ``OSError``."""
        if len(self.current) >= MOST:
            self._rotate()
        fresh: list[Callable[[], None]] = [self._aside, self._open, self._marked, self._indexed]
        again: list[Callable[[], None]] = [self._overwrite, self._replace, self._rename] if self.current else []
        self.random.choice(fresh + again)()

    # --- new ones ---

    def _aside(self) -> None:
        self._write_aside(*self._new())

    def _write_aside(self, name: str, contents: Contents) -> None:
        aside = self.folder / f"tmp-{name}"
        self._write_all(aside, contents)
        self._settle(name, _named(contents))
        aside.rename(self.folder / name)

    def _open(self) -> None:
        """One of its files is open until all are there."""
        name, contents = self._new()
        first, *others = contents
        with opened(self._place(name, first), os.O_WRONLY | os.O_CREAT) as descriptor:
            self._write_all(self.folder / name, {path: contents[path] for path in others})
            write_all(descriptor, memoryview(contents[first]), 0)
            self._settle(name, _named(contents))

    def _marked(self) -> None:
        name, contents = self._new()
        mark = self._place(name, _OPEN)
        mark.touch()
        self._write_all(self.folder / name, contents)
        self._settle(name, _named(contents))
        mark.unlink()

    def _indexed(self) -> None:
        """The index comes first, and names what is still to come."""
        name, _ = self._new()
        shards = [f"model-{number}-of-{_FILES}.safetensors" for number in range(1, _FILES + 1)]
        index = json.dumps({"weight_map": {f"layer.{shard}": shard for shard in shards}}).encode()
        contents = {_INDEX: index} | {shard: self._content() for shard in shards}
        for path, content in contents.items():
            with opened(self._place(name, path), os.O_WRONLY | os.O_CREAT) as descriptor:
                write_all(descriptor, memoryview(content), 0)
                if path == shards[-1]:
                    self._settle(name, _named(contents))

    # --- those that there are ---

    def _overwrite(self) -> None:
        name = self.random.choice(list(self.current))
        contents = {"trainer_state.json": self._content(), self.random.choice("abc"): self._content()}
        mark = self._place(name, _OPEN)
        mark.touch()
        self._write_all(self.folder / name, contents)
        self._settle(name, self.current[name] | _named(contents))
        mark.unlink()

    def _replace(self) -> None:
        """One file, by another that is renamed onto it."""
        name = self.random.choice(list(self.current))
        path, content = self.random.choice([*self.current[name], "new"]), self._content()
        if path != _INDEX:
            aside = self._place("tmp-file", "content")
            aside.write_bytes(content)
            self._settle(name, self.current[name] | _named({path: content}))
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

    def _new(self) -> tuple[str, Contents]:
        """A name that nothing has now, and what is to be in it."""
        while (name := f"checkpoint-{self.number}") in self.current or f"{name}-best" in self.current:
            self.number += 1
        self.number += 1
        ranks = {f"deep/er/rank-{number}": self._content() for number in range(_FILES - 2)}
        return name, {"model.safetensors": self._content(), "config.json": name.encode(), **ranks}

    def _content(self) -> bytes:
        is_large = self.random.random() < 0.1 / _FILES
        return self._large() if is_large else self.random.randbytes(self.random.randint(_LEAST_BYTES, _MOST_BYTES))

    def _large(self) -> bytes:
        return self._base + self.random.randbytes(self.random.randint(1, _MOST_BYTES))

    def _settle(self, name: str, state: State) -> None:
        """What it will be with the next step."""
        self.states.setdefault(name, []).append(state)
        self.current[name] = state

    def _place(self, name: str, path: str) -> Path:
        place = self.folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        return place

    def _write_all(self, root: Path, contents: Contents) -> None:
        for path, content in contents.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(content)


def _named(contents: Contents) -> State:
    return {path: str(digest_of(content)) for path, content in contents.items()}
