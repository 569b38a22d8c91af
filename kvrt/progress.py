"""How long jobs say how far they are."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol


class Progress(Protocol):
    """Told how far a long job is: the stage's name, units done, units in all (None: unknown)."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report `done` of `total` units (bytes) of `stage`."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A Progress for callers that want none."""


class Watched(Mapping[str, Any]):
    """Tensors by name; each one that is asked for tells a Progress of the bytes asked for before.

    For one who takes each tensor once and is done with it before the next.
    """

    def __init__(self, tensors: Mapping[str, Any], stage: str, total: int, progress: Progress):
        self._tensors = tensors
        self._stage = stage
        self._total = total
        self._progress = progress
        self._done = 0

    def __getitem__(self, name: str) -> Any:
        tensor = self._tensors[name]
        self._progress(self._stage, self._done, self._total)
        self._done = min(self._done + tensor.nbytes, self._total)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
