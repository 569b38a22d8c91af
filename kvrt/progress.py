"""How long jobs say how far they are."""

from typing import Protocol


class Progress(Protocol):
    """Told how far a long job is: the stage's name, units done, units in all (None: unknown)."""

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Report `done` of `total` units (bytes) of `stage`."""


def silent(stage: str, done: int, total: int | None) -> None:
    """A Progress for callers that want none."""
