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


def _address_of(typingctx: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.int64(array), codegen


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


# Loops over eight neighbours are unrolled before LLVM looks for vectors, so these say it outright.
_WIDTH = 8
_CODES = ir.VectorType(ir.IntType(16), _WIDTH)
_FLOATS = ir.VectorType(_FLOAT, _WIDTH)


def _affine8_code(builder: Any, out: Any, codes: Any, scale: Any, shift: Any) -> None:
    packed = builder.load(builder.inttoptr(codes, _CODES.as_pointer()), align=2)
    wide = builder.zext(packed, ir.VectorType(ir.IntType(32), _WIDTH))
    # llvmlite's own fma takes scalars only.
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_WIDTH}f32")
    result = builder.call(fma, [builder.sitofp(wide, _FLOATS), scale, shift])
    builder.store(result, builder.inttoptr(out, _FLOATS.as_pointer()), align=4)


def _affine8(typingctx: Any, out: Any, codes: Any, scale: Any, shift: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        vectors = [
            builder.load(builder.inttoptr(at, _FLOATS.as_pointer()), align=4) for at in args[2:]
        ]
        _affine8_code(builder, args[0], args[1], *vectors)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64, types.int64), codegen


def _affine8_same(typingctx: Any, out: Any, codes: Any, scale: Any, shift: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), _WIDTH), [0] * _WIDTH)
        empty = ir.Constant(_FLOATS, ir.Undefined)
        vectors = [
            builder.shuffle_vector(
                builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0)), empty, lanes
            )
            for value in args[2:]
        ]
        _affine8_code(builder, args[0], args[1], *vectors)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32, types.float32), codegen


def bind() -> None:
    """Bind the names of the dialect to compiler intrinsics."""
    jit.array = intrinsic(_array_at)
    jit.address_of = intrinsic(_address_of)
    jit.affine8 = intrinsic(_affine8)
    jit.affine8_same = intrinsic(_affine8_same)
    jit.half_to_float = intrinsic(_half_to_float)
    jit.float_to_half = intrinsic(_float_to_half)
    jit.bits_to_float = intrinsic(_bits_to_float)
    jit.float_to_bits = intrinsic(_float_to_bits)
    jit.bits_to_double = intrinsic(_bits_to_double)
    jit.atomic_add = intrinsic(_atomic_add)
