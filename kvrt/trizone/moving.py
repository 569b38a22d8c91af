"""How a store of zones forgets tokens, is copied, and goes to a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from ..kvstore.checks import check_kept
from ..tensor_file import Tensor, TensorFile
from .packing import Packing
from .saving import restored_state, saved_state
from .state import State

if TYPE_CHECKING:
    from .store import ZoneStore


class Movable(Packing):
    """The half of a `ZoneStore` that takes tokens away, and takes them elsewhere."""

    empty_twin: Callable[[], ZoneStore]
    _stepped: set[int]

    def __len__(self) -> int:
        """Tokens cached, those that were forgotten too: the next one's position."""
        return self._state.length

    def cut(self, tokens: int) -> int:
        """The most tokens, up to `tokens`, that `truncate` can keep."""
        return tokens if tokens >= self._state.frozen else 0

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` tokens: none, or all that were compressed and some that were not.

        Raises UnsupportedError for a cut among those that were compressed, CodecError where the
        store does not hold so many.
        """
        self._recover()
        check_kept(tokens, len(self))
        state = self._state
        if 0 < tokens < state.frozen:
            raise UnsupportedError(
                f"cache format {self.spec}: cannot truncate to {tokens} tokens, the first "
                f"{state.frozen} were compressed together; {state.frozen} to {len(self)}, or 0, "
                "work"
            )
        self._stepped.clear()
        self._moved = True
        if tokens:
            rows = state.rows - (state.length - tokens)
            layers = tuple(self._memory.with_room(zones, rows, rows) for zones in state.layers)
            self._state = replace(state, length=tokens, rows=rows, layers=layers)
        else:
            self._state = State(0, 0, 0, self._memory.empty_layers())
        self._recover()

    def clear(self) -> None:
        """Forget everything."""
        self.truncate(0)

    def shift(self, tokens: int) -> None:
        """Raises UnsupportedError: keys are kept after RoPE."""
        raise UnsupportedError(
            f"cache format {self.spec} keeps keys after RoPE, so they cannot move; k=...:page and "
            "k=...:pre can"
        )

    def fork(self) -> ZoneStore:
        """A store that holds the same tokens and goes its own way. Blocks are shared."""
        self._recover()
        other, state = self.empty_twin(), self._state
        layers = tuple(
            replace(
                zones,
                keys=zones.keys.copy(),
                values=zones.values.copy(),
                queries=None if zones.queries is None else zones.queries.copy(),
            )
            for zones in state.layers
        )
        other.adopt(replace(state, layers=layers))
        return other

    def adopt(self, state: State) -> None:
        """Hold what a state says, in place of what is held; one of `parts`, or of an empty twin."""
        self._moved = True
        self._state = state
        self._recover()

    def parts(self) -> State:
        """What the store holds, for reading; valid until it changes."""
        self._recover()
        return self._state

    def saved(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tensors of every byte that holds a token, and further texts, by name."""
        self._recover()
        return saved_state(self._state, self.ops)

    def restored(self, file: TensorFile, tokens: int) -> ZoneStore:
        """A new store of this kind with what a file holds. Raises StorageError."""
        store = self.empty_twin()
        store.adopt(restored_state(file, tokens, self.spec, store.parts(), self.ops))
        return store

    def fitted_tables(self) -> tuple[Any, ...]:
        """No arrays that were fitted to a model."""
        return ()
