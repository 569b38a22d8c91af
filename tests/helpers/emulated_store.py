"""The CPU backend with the cache's kernels replaced by the CUDA ones, emulated."""

from typing import Any

import numpy as np

from kvrt.backends import view as place
from kvrt.backends.cpu import CpuOps
from kvrt.backends.cpu_math import KINDS
from kvrt.backends.ops import PAGE_TOKENS
from kvrt.backends.view import PageView
from tests.emulator import EmulatedModule

WARPS = 2  # rows of a block of change_basis
BLOCK = (256,)
SURVEY_BLOCKS = 3


def tile_bytes(view: PageView, is_value: bool) -> int:
    """Shared memory of seal and gather."""
    side = place.VALUE_SIDE if is_value else place.KEY_SIDE
    dense = view.settings[side + place.CODEC] == 0
    return 0 if dense else PAGE_TOKENS * (view.head_dim + 1) * 4


class EmulatedStoreOps(CpuOps):
    """What moves tokens into and out of a store, by `store.cu`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = EmulatedModule("store.cu")

    def change_basis(
        self,
        rows: Any,
        inwards: bool,
        *,
        turns: Any = None,
        bias: Any = None,
        bias_turns: Any = None,
        hadamard: int = 0,
    ) -> None:
        n, heads, dim = rows.shape
        addresses = [0 if part is None else part for part in (turns, bias, bias_turns)]
        self.module.launch(
            "change_basis", (n, -(-heads // WARPS)), (WARPS * 32,),
            rows, heads, dim, int(inwards), *addresses, hadamard, shared=WARPS * dim * 4,
        )  # fmt: skip

    def append(self, view: PageView, k: Any, v: Any, slot: int, sink: bool = False) -> None:
        self.module.launch(
            "append", (len(k), view.num_kv_heads), (32,), view.address, k, v, slot, int(sink)
        )

    def recall(
        self, view: PageView, is_value: bool, slot: int, out: Any, sink: bool = False
    ) -> None:
        self.module.launch(
            "recall", (len(out), view.num_kv_heads), (32,),
            view.address, int(is_value), slot, int(sink), out,
        )  # fmt: skip

    def round_rows(self, rows: Any, dtype: np.dtype) -> None:
        self.module.launch("round_rows", (len(rows),), (64,), rows, rows[0].size, KINDS[dtype])

    def seal(
        self,
        view: PageView,
        first_page: int,
        count: int,
        new: tuple[Any, Any] | None,
        new_start: int,
        tail_first: int,
        tail_slot: int,
        measure: bool,
    ) -> None:
        heads, table = view.num_kv_heads, view.extent.table_address
        for is_value, survey in enumerate(view.surveys):
            fresh, tokens = (0, 0) if new is None else (new[is_value], len(new[is_value]))
            source = (tail_first, tail_slot, fresh, new_start, tokens)
            surveyed = {"never": 0, "first": int(measure), "every": count}[survey]
            if surveyed:
                self.module.launch(
                    "survey", (surveyed, SURVEY_BLOCKS), BLOCK,
                    view.address, is_value, table, first_page, int(measure), *source,
                )  # fmt: skip
            self.module.launch(
                "seal", (count * heads,), BLOCK,
                view.address, is_value, table, first_page, *source,
                shared=tile_bytes(view, bool(is_value)),
            )  # fmt: skip

    def gather(self, view: PageView, is_value: bool, first_page: int, count: int, out: Any) -> None:
        self.module.launch(
            "gather", (count * view.num_kv_heads,), BLOCK,
            view.address, int(is_value), view.extent.table_address, first_page, out,
            shared=tile_bytes(view, is_value),
        )  # fmt: skip
