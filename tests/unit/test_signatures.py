"""What is read from kernels' sources, and the arguments that are refused by it."""

import numpy as np
import pytest

from kvrt.backends import view
from kvrt.backends.signatures import Parameter, Signature, read_signatures, signatures, view_defines
from kvrt.cuda_src import SOURCE_DIR
from kvrt.errors import KernelError

SOURCE = """
// extern "C" __global__ void not_this(int n) {
/* nor
extern "C" __global__ void that(int n) { */
__device__ float helper(float x) { return x; }
extern "C" __global__ void scale(const float* __restrict__ x, // the input, (n,)
                                 float *out, int n, i64 pitch, float by) {
}
extern "C" __global__ void __launch_bounds__(32 * (1 + ONE), f(2))
    other(const uint4* a, u32 b, u64 c, void* d)
{
}
extern "C" __global__ void nothing() {}
"""


def read(text: str) -> dict[str, list[tuple[str, object, int]]]:
    return {
        name: [(p.name, p.number, p.alignment) for p in signature.parameters]
        for name, signature in signatures(text).items()
    }


def test_kernels_are_read_from_a_source() -> None:
    assert read(SOURCE) == {
        "scale": [
            ("x", None, 4),
            ("out", None, 4),
            ("n", np.int32, 1),
            ("pitch", np.int64, 1),
            ("by", np.float32, 1),
        ],
        "other": [("a", None, 16), ("b", np.uint32, 1), ("c", np.uint64, 1), ("d", None, 1)],
        "nothing": [],
    }


@pytest.mark.parametrize(
    "kernel",
    [
        "__global__ void k(int n) {}",
        'extern "C" __global__ void PLAIN k(int n) {}',
        'extern "C" __global__ int k(int n) {}',
        'extern "C" __global__ void k(int n) {} extern "C" __global__ void k(float n) {}',
        'extern "C" __global__ void k(double x) {}',
        'extern "C" __global__ void k(unsigned int x) {}',
        'extern "C" __global__ void k(const float** x) {}',
        'extern "C" __global__ void k(int) {}',
    ],
)
def test_a_kernel_that_cannot_be_read_is_an_error(kernel: str) -> None:
    """It must not be left out in silence, to be missed at its first launch."""
    with pytest.raises(KernelError):
        signatures(kernel)


def test_arguments_are_converted() -> None:
    scale = signatures(SOURCE)["scale"]
    values = scale.convert([4096, np.int64(8), np.uint8(3), 1 << 40, 2])
    assert [v.dtype for v in values] == [np.uint64, np.uint64, np.int32, np.int64, np.float32]
    assert [v.item() for v in values] == [4096, 8, 3, 1 << 40, 2.0]


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, -4, "x must be an address"),
        (0, 1 << 64, "x must be an address"),
        (0, 4.0, "x must be an address"),
        (0, None, "x must be an address, got None"),
        (0, True, "x must be an address"),
        (0, np.zeros((3, 500)), r"got an array float64 of \(3, 500\)"),
        (1, 6, "out must be aligned to 4 bytes, got address 0x6"),
        (2, 1 << 31, "n must be int32"),
        (2, 1.0, "n must be int32"),
        (2, True, "n must be int32"),
        (2, "3", "n must be int32"),
        (3, 1 << 63, "pitch must be int64"),
        (4, "eps", "by must be float32, got 'eps'"),
        (4, True, "by must be float32"),
        (4, 1j, "by must be float32"),
        (4, [1.0] * 99, "by must be float32, got a list"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(place: int, value: object, message: str) -> None:
    arguments: list[object] = [64, 64, 1, 1, 1.0]
    arguments[place] = value
    with pytest.raises(KernelError, match=message) as caught:
        signatures(SOURCE)["scale"].convert(arguments)
    assert "\n" not in str(caught.value) and str(caught.value).startswith("scale")


def test_the_number_of_arguments_is_checked() -> None:
    one = Signature("one", (Parameter("n", np.int32),))
    for values in ([], [1, 2]):
        with pytest.raises(KernelError, match=f"one takes 1 arguments, got {len(values)}"):
            one.convert(values)


@pytest.mark.parametrize("path", sorted(SOURCE_DIR.glob("*.cu")), ids=lambda path: path.name)
def test_every_kernel_of_the_product_can_be_read(path) -> None:
    assert read_signatures(path)


def test_names_of_the_view_are_defines() -> None:
    defines = view_defines()
    assert defines["VIEW_HEADS"] == view.HEADS and defines["VIEW_PRE"] == view.PRE
    assert all(type(value) is int for value in defines.values())
