"""The memory that a store has once and for all: sinks, tail, scales, tables, kernels' settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..backends import view as place
from ..backends.cpu_math import KINDS
from ..backends.ops import Ops
from ..backends.view import Extent, PageView
from ..errors import CodecError
from .basis import FORMS, Basis, hadamard_block
from .codecs import IntQ
from .layout import Geometry
from .spec import KVSpec
from .stats import codec_bytes, layouts, tail_rows

if TYPE_CHECKING:
    from ..calibration import Fitted


class Layers:
    """Arrays of all layers of one store."""

    def __init__(
        self,
        geometry: Geometry,
        spec: KVSpec,
        ops: Ops,
        basis: Basis,
        calibration: Fitted | None,
    ):
        """Raises CodecError where a codec needs fitted tables and there are none."""
        self._ops = ops
        self._layouts = layouts(geometry, spec)
        self.slab_bytes = sum(layout.page_bytes for layout in self._layouts)
        heads, dim, rows = geometry.num_kv_heads, geometry.head_dim, tail_rows(spec)
        self._sinks, self._tail, self._states, self._tables = [], [], [], []
        for index, layout in enumerate(self._layouts):
            dtypes = [codec.exact_dtype for codec in layout.codecs]
            self._sinks.append([ops.empty((heads, spec.sink, dim), dtype) for dtype in dtypes])
            self._tail.append([ops.empty((heads, rows, dim), dtype) for dtype in dtypes])
            sizes = codec_bytes(layout)
            # Ones: what a scale is before it is measured.
            states = [np.ones(state // 4, np.float32) for state, _ in sizes]
            self._states.append([ops.to_device(state) for state in states])
            self._tables.append(
                [
                    self._fitted(index, bool(is_value), spec, calibration, size)
                    for is_value, (_, size) in enumerate(sizes)
                ]
            )
        rows_of_settings = [
            self._layer_settings(index, spec, basis, rows) for index in range(len(self._layouts))
        ]
        self._host_settings = np.stack(rows_of_settings)  # (layers, LAYER_SETTINGS) i64
        self.settings = ops.to_device(self._host_settings)

    def _fitted(
        self,
        layer: int,
        is_value: bool,
        spec: KVSpec,
        calibration: Fitted | None,
        size: int,
    ) -> Any:
        side = spec.sides(layer)[is_value]
        if not side.codec.calibrated:
            return self._ops.empty((0,))
        if calibration is None:
            raise CodecError(f"cache format {side} needs a calibration; `kvrt calibrate` makes one")
        table = side.codec.tables(calibration, layer, is_value, side.rope, side.had)
        if table.nbytes != size:
            raise CodecError(
                f"layer {layer}: {table.nbytes} bytes of fitted tables, {side} needs {size}"
            )
        return self._ops.to_device(table)

    def _layer_settings(self, layer: int, spec: KVSpec, basis: Basis, rows: int) -> np.ndarray:
        layout, address = self._layouts[layer], self._ops.address
        k, v = spec.sides(layer)
        sinks, tail, states = self._sinks[layer], self._tail[layer], self._states[layer]
        bias, turns = basis.bias(layer), basis.turns
        norm = isinstance(k.codec, IntQ) and k.codec.norm
        settings = np.zeros(place.LAYER_SETTINGS, np.int64)  # (LAYER_SETTINGS,)
        values = {
            place.HEADS: layout.num_kv_heads,
            place.DIM: layout.head_dim,
            place.KEY_KIND: KINDS[k.codec.exact_dtype],
            place.VALUE_KIND: KINDS[v.codec.exact_dtype],
            place.SINK_ROWS: spec.sink,
            place.TAIL_ROWS: rows,
            place.SINK_KEYS: address(sinks[0]),
            place.SINK_VALUES: address(sinks[1]),
            place.TAIL_KEYS: address(tail[0]),
            place.TAIL_VALUES: address(tail[1]),
            place.LAYER_OFFSET: sum(before.page_bytes for before in self._layouts[:layer]),
            place.RUN_BYTES: layout.run_bytes,
            place.SHARED_OFFSET: layout.num_kv_heads * layout.run_bytes,
            place.FORM: FORMS[k.rope],
            place.KEY_HADAMARD: hadamard_block(k, layout.head_dim),
            place.VALUE_HADAMARD: hadamard_block(v, layout.head_dim),
            place.KEY_BIAS: 0 if bias is None else address(bias),
            place.TURNS: 0 if turns is None else address(turns),
            place.KEY_NORM: address(states[0]) if norm else 0,
            place.QUICK: basis.quick_pairs,
        }
        for name, value in values.items():
            settings[name] = value
        for is_value, start in enumerate((place.KEY_SIDE, place.VALUE_SIDE)):
            own = layout.side_settings(bool(is_value))
            settings[start : start + len(own)] = own
            settings[start + place.STATE] = address(states[is_value])
            settings[start + place.TABLE] = address(self._tables[layer][is_value])
            settings[start + place.WORK] = layout.codecs[is_value].work_bytes(layout.head_dim)
        return settings

    def views(self, extent: Extent) -> list[PageView]:
        """One view a layer; all share the extent."""
        row = self.settings.nbytes // len(self._layouts)
        start = self._ops.address(self.settings)
        return [
            PageView(
                extent,
                self._host_settings[layer],
                start + layer * row,
                (layout.k.survey, layout.v.survey),
            )
            for layer, layout in enumerate(self._layouts)
        ]

    @property
    def sink_arrays(self) -> list[Any]:
        return [part for pair in self._sinks for part in pair]

    @property
    def tail_arrays(self) -> list[Any]:
        return [part for pair in self._tail for part in pair]

    @property
    def state_arrays(self) -> list[Any]:
        """Scales measured on the first sealed page: f32, K and V of each layer."""
        return [part for pair in self._states for part in pair]

    @property
    def table_arrays(self) -> list[Any]:
        """Fitted tables: f32 or bytes, K and V of each layer."""
        return [part for pair in self._tables for part in pair]

    @property
    def codec_arrays(self) -> list[Any]:
        return self.state_arrays + self.table_arrays

    def copy_from(self, other: Layers) -> None:
        """Take over what another store of the same format holds outside of pages."""
        for name in ("sink_arrays", "tail_arrays", "state_arrays"):
            for target, source in zip(getattr(self, name), getattr(other, name), strict=True):
                target[...] = source
