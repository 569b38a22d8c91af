"""From how many tokens on a format with codebooks takes less memory than another."""

import json

import pytest
from click.testing import CliRunner

from kvrt.cli.main import cli
from kvrt.kvstore import Geometry, KVSpec, estimate, smaller_from

SHAPE = Geometry(32, 8, 128)


@pytest.mark.parametrize("name", ["vq2", "vq1", "vqkv", "kvrt2"])
@pytest.mark.parametrize("other", ["f16", "kivi2", "kvrt4"])
def test_it_is_where_the_estimates_cross(name: str, other: str) -> None:
    spec, than = KVSpec.parse(name), KVSpec.parse(other)
    tokens = smaller_from(SHAPE, spec, than)
    if (name, other) == ("kvrt2", "kivi2"):
        assert tokens is None  # both add 3 bits a number
        return
    assert tokens is not None
    assert estimate(SHAPE, spec, tokens - 1) >= estimate(SHAPE, than, tokens - 1)
    for more in (tokens, tokens + 64, 2 * tokens + 640, 1 << 22):
        assert estimate(SHAPE, spec, more) < estimate(SHAPE, than, more)


def test_a_larger_format_never_is() -> None:
    assert smaller_from(SHAPE, KVSpec.parse("f16"), KVSpec.parse("vq2")) is None


def test_info_says_it_of_codebooks_alone() -> None:
    run = CliRunner().invoke(
        cli, ["info", "synthetic:llama-3.1-8b", "--kv", "vqkv,kvrt2", "--json"]
    )
    rows = {row["spec"]: row for row in json.loads(run.stdout)["kv"]}
    assert "smaller_from" not in rows["kvrt2"]
    found = rows["vqkv"]["smaller_from"]
    assert found["f16"] < found["kivi2"]
    plain = CliRunner().invoke(cli, ["info", "synthetic:llama-3.1-8b", "--kv", "vqkv"]).stdout
    f16, kivi2 = (f"smaller than {name} from {count:,} tokens on" for name, count in found.items())
    assert f"vqkv, codebooks counted: {f16}, {kivi2}\n" in plain


def test_info_says_where_it_never_is() -> None:
    run = CliRunner().invoke(
        cli, ["info", "synthetic:llama-3.1-8b", "--kv", "k=rvq64x1024,v=rvq64x1024"]
    )
    assert run.stdout.endswith("tokens on, never smaller than kivi2\n")
