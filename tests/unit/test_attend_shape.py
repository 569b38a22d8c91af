"""The shape of a CTA of decode attention: what it needs must be there."""

import pytest

from kvrt.backends.attend_variant import compiled, shared_bytes
from kvrt.backends.cpu import CpuOps
from kvrt.kvstore import Geometry
from tests.helpers.stores import new_store

SPECS = [
    "f16", "bf16", "f8", "q8_0", "kivi2", "kivi4", "kvrt2", "kvrt4", "kvquant3:1%", "kvquant4:1%",
    "k=nuq4,v=nuq4",
]  # fmt: skip


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("spec", SPECS)
def test_fits_into_shared_memory(ops: CpuOps, spec: str, dim: int, shared: int) -> None:
    settings = new_store(ops, spec, Geometry(1, 8, dim)).view(0).settings.tolist()
    defines = compiled(settings, shared)
    needed = shared_bytes(defines, defines["WARPS"], defines["STAGES"])
    # Barriers and a ticket are not in it.
    assert needed + 8 * defines["WARPS"] * defines["STAGES"] + 64 <= shared


def test_many_warps_where_a_warps_units_are_small(ops: CpuOps) -> None:
    warps = {}
    for spec in ("kivi2", "kvrt2", "kvrt4", "f16", "kvquant4:1%"):
        settings = new_store(ops, spec, Geometry(1, 8, 128)).view(0).settings.tolist()
        warps[spec] = compiled(settings)["WARPS"]
    assert warps == {"kivi2": 8, "kvrt2": 8, "kvrt4": 8, "f16": 12, "kvquant4:1%": 8}


def test_levels_are_looked_up_where_that_costs_no_warps(ops: CpuOps) -> None:
    looked_up = {}
    for spec in ("k=nuq4,v=nuq4", "kvquant2", "k=int4:channel:g64,v=nuq2", "kivi4", "kvquant4:1%"):
        settings = new_store(ops, spec, Geometry(1, 8, 128)).view(0).settings.tolist()
        looked_up[spec] = [compiled(settings, kib << 10).get("LOOKUP", 0) for kib in (227, 163, 99)]
    assert looked_up == {
        "k=nuq4,v=nuq4": [1, 0, 0],
        "kvquant2": [1, 0, 0],
        "k=int4:channel:g64,v=nuq2": [1, 0, 0],
        "kivi4": [0, 0, 0],
        "kvquant4:1%": [0, 0, 0],
    }


def test_pages_come_by_side_where_few_warps_have_whole_ones(ops: CpuOps) -> None:
    shapes = {}
    for spec in ("f8", "q8_0", "k=e4m3:pre,v=e4m3", "kvrt4", "f16", "kvquant4:1%"):
        for dim in (128, 256):
            settings = new_store(ops, spec, Geometry(1, 8, dim)).view(0).settings.tolist()
            found = compiled(settings)
            shapes[spec, dim] = found["WARPS"], found["STAGES"], found.get("BY_SIDE", 0)
    assert shapes == {
        ("f8", 128): (8, 3, 1), ("f8", 256): (4, 3, 1),
        ("q8_0", 128): (8, 3, 1), ("q8_0", 256): (4, 3, 1),
        ("k=e4m3:pre,v=e4m3", 128): (8, 3, 1), ("k=e4m3:pre,v=e4m3", 256): (4, 2, 1),
        ("kvrt4", 128): (8, 2, 0), ("kvrt4", 256): (8, 3, 1),
        ("f16", 128): (12, 2, 0), ("f16", 256): (4, 3, 0),
        ("kvquant4:1%", 128): (8, 2, 0), ("kvquant4:1%", 256): (4, 2, 0),
    }  # fmt: skip
