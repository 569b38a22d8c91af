"""Numba intrinsics behind `kvrt.backends.jit`. Imported by the compiler only."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from . import jit

_HALF = ir.HalfType()
_FLOAT = ir.FloatType()
_DOUBLE = ir.DoubleType()


def _array_at(typingctx: Any, address: Any, shape: Any, dtype: Any) -> Any:
    array_type = types.Array(dtype.dtype, len(shape), "C")
    signature = array_type(types.int64, types.UniTuple(types.int64, len(shape)), dtype)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = make_array(array_type)(context, builder)
        item = context.get_data_type(array_type.dtype)
        sizes = cgutils.unpack_tuple(builder, args[1], len(shape))
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(item))
        strides = [itemsize]
        for size in reversed(sizes[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        populate_array(
            array,
            data=builder.inttoptr(args[0], item.as_pointer()),
            shape=sizes,
            strides=strides,
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()

    return signature, codegen


def _half_to_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], _HALF), _FLOAT)

    return types.float32(types.uint16), codegen


def _float_to_half(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _HALF), ir.IntType(16))

    return types.uint16(types.float32), codegen


def _bits_to_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.uint32), codegen


def _float_to_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


def _bits_to_double(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _DOUBLE)

    return types.float64(types.int64), codegen


def _atomic_add(typingctx: Any, address: Any, amount: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


def bind() -> None:
    """Bind the names of the dialect to compiler intrinsics."""
    jit.array = intrinsic(_array_at)
    jit.half_to_float = intrinsic(_half_to_float)
    jit.float_to_half = intrinsic(_float_to_half)
    jit.bits_to_float = intrinsic(_bits_to_float)
    jit.float_to_bits = intrinsic(_float_to_bits)
    jit.bits_to_double = intrinsic(_bits_to_double)
    jit.atomic_add = intrinsic(_atomic_add)
