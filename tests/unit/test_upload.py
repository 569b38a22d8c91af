"""Large arrays go to a GPU through two pinned buffers, whole and in order."""

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvrt.backends.cuda import CudaOps
from kvrt.backends.cuda_device import CudaDevice
from kvrt.backends.upload import BUFFER_BYTES, LEAST_BYTES, Uploader
from kvrt.errors import OutOfMemoryError
from tests.helpers.fake_cupy import FakeCupy, FakeGpu, FakePinned

PIECE = 1000  # bytes of a buffer


@pytest.fixture
def cupy() -> FakeCupy:
    return FakeCupy()


def numbers(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("size", [1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 7 * PIECE + 3])
def test_every_byte_arrives(cupy: FakeCupy, size: int) -> None:
    uploader = Uploader(cupy, PIECE)
    source = numbers(size)
    target = cupy.empty((size,), np.uint8)
    uploader.copy(source, target)
    cupy.stream.synchronize()  # all that work on the current stream has to wait for
    assert np.array_equal(target, source)
    assert sum(cupy.copies) == size and max(cupy.copies) <= PIECE


def test_the_source_is_free_and_buffers_are_not_filled_too_early(cupy: FakeCupy) -> None:
    """The copies of the fake happen as late as they may: a buffer filled too early is seen."""
    uploader = Uploader(cupy, PIECE)
    sources = [numbers(size, size) for size in (3 * PIECE, 10, 5 * PIECE + 1)]
    targets = [cupy.empty(source.shape, np.uint8) for source in sources]
    for source, target in zip(sources, targets):
        kept = source.copy()
        uploader.copy(kept, target)
        kept[:] = 0
    cupy.stream.synchronize()
    for source, target in zip(sources, targets):
        assert np.array_equal(target, source)


def test_what_was_in_the_memory_before_is_done_with_first(cupy: FakeCupy) -> None:
    uploader = Uploader(cupy, PIECE)
    source, target = numbers(3 * PIECE), cupy.empty((3 * PIECE,), np.uint8)
    seen: list[int] = []
    cupy.stream.put(lambda: seen.append(int(target.max())))  # an earlier reader of the memory
    uploader.copy(source, target)
    uploader.close()
    assert seen == [0] and np.array_equal(target, source)


def test_buffers_are_given_back(cupy: FakeCupy) -> None:
    uploader = Uploader(cupy, PIECE)
    assert FakePinned.pinned == 2 * PIECE
    uploader.copy(numbers(3 * PIECE), target := cupy.empty((3 * PIECE,), np.uint8))
    uploader.close()
    assert FakePinned.pinned == 0 and np.array_equal(target, numbers(3 * PIECE))


def test_where_nothing_can_be_pinned_it_is_said(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakePinned, "refuse", True)
    with caplog.at_level(logging.WARNING):
        uploader = Uploader(cupy, PIECE)
    assert "no memory can be pinned" in caplog.text
    source, target = numbers(3 * PIECE), cupy.empty((3 * PIECE,), np.uint8)
    uploader.copy(source, target)
    cupy.stream.synchronize()
    assert np.array_equal(target, source)


# --- the device ---


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_device_uploads_small_and_large(cupy: FakeCupy, dtype: Any) -> None:
    device = CudaDevice(0, cupy)
    small = numbers(1024).view(dtype)
    large = numbers(3 * LEAST_BYTES).reshape(3, -1).view(dtype)
    assert np.array_equal(device.upload(small).view(np.uint8), small.view(np.uint8))
    assert cupy.copies == []
    held = device.upload(large)
    device.end_uploads()
    assert (held.shape, held.dtype) == (large.shape, large.dtype)
    assert np.array_equal(held.view(np.uint8), large.view(np.uint8))
    assert sum(cupy.copies) == large.nbytes and FakePinned.pinned == 0
    across = large.T
    held = device.upload(across)
    device.end_uploads()
    assert held.flags.c_contiguous
    assert np.array_equal(held.view(np.uint8), np.ascontiguousarray(across).view(np.uint8))


def test_the_host_holds_two_buffers_and_no_more(cupy: FakeCupy) -> None:
    device = CudaDevice(0, cupy)
    # Held, since the copies are still to come.
    held = [device.upload(numbers(LEAST_BYTES, seed)) for seed in range(3)]
    device.end_uploads()
    device.end_uploads()
    assert all(np.array_equal(x, numbers(LEAST_BYTES, seed)) for seed, x in enumerate(held))
    assert FakePinned.most == 2 * BUFFER_BYTES


def test_no_memory_is_one_error_of_ours(cupy: FakeCupy) -> None:
    device = CudaDevice(1, cupy)
    cupy.pool.limit = 1000
    ways: list[Any] = [
        lambda: device.empty((1001,), np.uint8),
        lambda: device.zeros((1001,), np.uint8),
        lambda: device.upload(numbers(1001)),
        lambda: device.upload(numbers(LEAST_BYTES)),
    ]
    for way in ways:
        with pytest.raises(OutOfMemoryError, match=r"^cuda:1, A GPU has no memory left: Out of"):
            way()
    assert cupy.pool.used == 0
    cupy.pool.unused = 900  # is given back where it is in the way
    assert device.empty((1000,), np.uint8).shape == (1000,)
    assert (cupy.pool.unused, device.peak_bytes()) == (0, 1000)
    cupy.pool.used, cupy.pool.unused = 200, 700
    with pytest.raises(OutOfMemoryError):
        device.empty((801,), np.uint8)
    assert (cupy.pool.total_bytes(), device.peak_bytes()) == (200, 1000)
    device.reset_peak()
    assert device.peak_bytes() == 200


def test_arrays_are_made_on_their_own_device(cupy: FakeCupy) -> None:
    first, second = CudaDevice(0, cupy), CudaDevice(1, cupy)
    for device in (second, first, second):
        device.empty((1,), np.uint8)
        assert FakeGpu.current == device.index


def test_only_weights_are_worth_the_buffers(cupy: FakeCupy) -> None:
    """Angles of a long prompt are large too; nobody would give the buffers back after it."""
    ops = CudaOps(CudaDevice(0, cupy))
    large = numbers(LEAST_BYTES)
    assert np.array_equal(ops.to_device(large), large)
    assert FakePinned.most == 0
    held = ops.matrix(large.view(np.float16).reshape(1024, -1))
    assert FakePinned.most == 2 * BUFFER_BYTES
    ops.trim()
    assert np.array_equal(held.array.view(np.uint8).reshape(-1), large)


def test_a_hint_that_has_no_room_refuses_nothing(cupy: FakeCupy) -> None:
    ops = CudaOps(CudaDevice(0, cupy))
    cupy.pool.limit = 1000
    ops.expect(16, 500)
    assert ops.empty((900,), np.uint8).nbytes == 900
