"""Cache formats that a GPU's kernels do not read: refused before anything of a model is loaded."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvrt
from kvrt import backends
from kvrt.backends import cuda_device
from kvrt.calibrations import Calibrations
from kvrt.cli.main import run
from kvrt.errors import UnsupportedError
from kvrt.generate import check_gpu_format
from kvrt.kvstore import Geometry, KVSpec
from tests.helpers.fake_cupy import SHARED, FakeCupy, installed
from tests.helpers.tiny_model import write_tiny_model


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    yield from installed(monkeypatch)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("f32", "f32 caches are for the CPU"),
        ("k=q8_0,v=f16", "both packed or neither"),
        ("k=bf16,v=f16", "both bf16 or neither"),
        ("f16,layers[1-1]=k=f16,v=q8_0", "both packed or neither"),
        ("k=pq8x256:r1,v=f16", "both vector-quantised or neither is, such as vq2"),
        ("k=nuq4,v=pq8x256:r1:perhead", "both vector-quantised or neither is, such as vq2"),
        ("k=rvq4x512,v=int4:token:g32", "both vector-quantised or neither is, such as vq2"),
        ("vq2,layers[1]=k=f16,v=rvq4x512", "both vector-quantised or neither is, such as vq2"),
        ("k=pq8x256:r1,v=rvq4x512", "both pq8x256, or both rvq"),
        ("vq1,layers[0]=k=rvq4x512,v=pq8x256:r1", "both pq8x256, or both rvq"),
        ("k=rvq4x512:perhead,v=rvq4x512", "share the books of rvq; pq8x256 takes perhead"),
        ("k=rvq4x2048,v=rvq4x512", "at most 1024 entries"),
        ("k=pq8x256:r1:page,v=pq8x256:r1", "those after RoPE; page and pre are for the CPU"),
        ("k=pq8x256:r1:pre,v=pq8x256:r1", "those after RoPE; page and pre are for the CPU"),
        ("f16,layers[1]=k=pq8x256:r1:page:had,v=pq8x256:r1", "those after RoPE; page and pre"),
    ],
)
def test_formats_that_a_gpu_does_not_read_are_refused_before_loading(spec: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cache format .*{why}"):
        check_gpu_format(Geometry(2, 2, 64), KVSpec.parse(spec), SHARED)


@pytest.mark.parametrize(
    "spec",
    ["f16", "bf16", "kvrt2", "vq2", "vq1.5", "vq1", "vqkv", "k=pq8x256:r2:had,v=pq8x256:r2:had",
     "vq2,layers[1]=kvrt4", "kvquant2:1%"],
)  # fmt: skip
def test_formats_that_it_reads(spec: str) -> None:
    check_gpu_format(Geometry(2, 2, 64), KVSpec.parse(spec), SHARED)


def test_keys_with_a_bias_are_not_vector_quantised() -> None:
    biased = Geometry(2, 2, 64, key_bias=True)
    with pytest.raises(UnsupportedError, match=r"cache format vq2: .*key biases.*kvrt2 works"):
        check_gpu_format(biased, KVSpec.parse("vq2"), SHARED)
    for spec in ("kvrt2", "kvquant2"):
        check_gpu_format(biased, KVSpec.parse(spec), SHARED)


@pytest.mark.parametrize(
    ("spec", "dim", "shared", "fits"),
    [
        ("vq2", 128, 227, True), ("vq2", 128, 163, False), ("vq1.5", 128, 163, True),
        ("vq1", 128, 99, False), ("vq2", 64, 99, True), ("vq2", 256, 227, False),
        ("vq1", 256, 227, True), ("k=pq8x256:r3,v=pq8x256:r3", 128, 227, False),
        ("vqkv", 128, 163, True), ("vqkv", 128, 99, False),
    ],
)  # fmt: skip
def test_codebooks_must_fit_into_shared_memory(
    spec: str, dim: int, shared: int, fits: bool
) -> None:
    geometry, parsed = Geometry(2, 2, dim), KVSpec.parse(spec)
    if fits:
        check_gpu_format(geometry, parsed, shared << 10)
        return
    said = rf"cache format .* [\d,]+ bytes of shared memory a block, this GPU has {shared << 10:,}"
    with pytest.raises(UnsupportedError, match=said):
        check_gpu_format(geometry, parsed, shared << 10)


@pytest.mark.parametrize(
    ("spec", "bias", "shared", "said"),
    [
        ("k=pq8x256:r1,v=f16", False, 227, "both vector-quantised or neither is, such as vq2"),
        ("vqkv,window=64", False, 99, "this GPU has 101,376; fewer entries take less"),
        ("k=pq8x256:r1:page,v=pq8x256:r1", False, 227, "page and pre are for the CPU"),
        ("vq2", True, 227, "kvrt2 works"),
        ("vq2", False, 48, "this GPU has 49,152; fewer stages take less, such as vq1"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_command_line_refuses_them_before_it_reads_weights(
    cupy: FakeCupy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, command: str,
    spec: str, bias: bool, shared: int, said: str,
) -> None:  # fmt: skip
    """Nor does it look for codebooks, or for the vocabulary."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("too late")

    folder = tmp_path / "m"
    write_tiny_model(folder, family="qwen2" if bias else "llama", tokenizer=True, head_dim=64)
    for path in folder.glob("*.safetensors"):
        path.write_bytes(b"")
    monkeypatch.setattr(backends, "get_ops", refuse)
    monkeypatch.setattr(Calibrations, "get", refuse)
    cuda_device.get_device(0).max_shared = shared << 10
    args = [command, "-m", str(folder), "-p", "a", "--device", "cuda", "--kv", spec]
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("kvrt: error: cache format ") and err.endswith(f"{said}\n"), err


def test_an_empty_cache_of_another_format_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path / "m", tokenizer=True)
    model = kvrt.load(str(tmp_path / "m"), device="cpu", threads=1)
    monkeypatch.setattr(type(model.ops), "name", "cuda")
    with pytest.raises(UnsupportedError, match="for the CPU"):
        model.new_store(KVSpec.parse("f32"))
    with pytest.raises(UnsupportedError, match="head_dim of 64 or 128"):
        model.new_store(KVSpec.parse("k=rvq1x256,v=rvq1x256"))


def test_heads_that_a_gpu_does_not_read() -> None:
    for dim in (8, 72, 264):
        with pytest.raises(UnsupportedError, match=f"head_dim must be.*has {dim}"):
            check_gpu_format(Geometry(2, 2, dim), KVSpec.parse("f16"), SHARED)
    check_gpu_format(Geometry(2, 2, 80), KVSpec.parse("f16"), SHARED)
