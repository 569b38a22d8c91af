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


def _fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.fma(*args)

    return types.float32(types.float32, types.float32, types.float32), codegen


def _atomic_add(typingctx: Any, address: Any, amount: Any) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


# Loops over eight neighbours are unrolled before LLVM looks for vectors, so these say it outright.
_WIDTH = 8
_SHORTS = ir.VectorType(ir.IntType(16), _WIDTH)
_WORDS = ir.VectorType(ir.IntType(32), _WIDTH)
_HALVES = ir.VectorType(_HALF, _WIDTH)
_FLOATS = ir.VectorType(_FLOAT, _WIDTH)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    """A vector of one number."""
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, empty, ir.Constant(_WORDS, [0] * _WIDTH))


def _short(builder: Any, value: Any) -> Any:
    return _splat(builder, builder.trunc(value, ir.IntType(16)), _SHORTS)


def _field(builder: Any, codes: Any, right: Any, mask: Any) -> Any:
    packed = builder.load(builder.inttoptr(codes, _SHORTS.as_pointer()), align=2)
    return builder.and_(builder.lshr(packed, _short(builder, right)), mask)


def _vector_at(builder: Any, address: Any, kind: Any, offset: int = 0) -> Any:
    """A pointer to a vector `offset` bytes behind an address."""
    place = builder.add(address, ir.Constant(ir.IntType(64), offset))
    return builder.inttoptr(place, kind.as_pointer())


def _affine8x8(by_rows: bool) -> Any:
    """The intrinsic for scales of eight columns, or of eight rows."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        out, stride, codes, right, mask, scale_at, shift_at = args
        mask = _short(builder, mask)
        # llvmlite's own fma takes scalars only.
        kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
        fma = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{_WIDTH}f32")

        def operand(address: Any, row: int) -> Any:
            if not by_rows:
                number = builder.load(_vector_at(builder, address, _FLOAT, 4 * row))
                return _splat(builder, number, _FLOATS)
            return builder.load(_vector_at(builder, address, _FLOATS), align=4)

        common = [operand(address, 0) for address in (scale_at, shift_at)] if by_rows else []
        for row in range(_WIDTH):
            field = _field(builder, _row(builder, codes, row), right, mask)
            scale, shift = common or [operand(address, row) for address in (scale_at, shift_at)]
            numbers = builder.sitofp(builder.zext(field, _WORDS), _FLOATS)
            result = builder.call(fma, [numbers, scale, shift])
            builder.store(result, builder.inttoptr(out, _FLOATS.as_pointer()), align=4)
            out = builder.add(out, stride)
        return context.get_dummy_value()

    def affine(
        typingctx: Any, out: Any, stride: Any, codes: Any, right: Any, mask: Any, scale: Any,
        shift: Any,
    ) -> Any:  # fmt: skip
        return types.none(*[types.int64] * 7), codegen

    return affine


def _row(builder: Any, codes: Any, row: int) -> Any:
    return builder.add(codes, ir.Constant(ir.IntType(64), row * 2 * _WIDTH))


def _minifloat8x8(
    typingctx: Any, out: Any, stride: Any, codes: Any, right: Any, left: Any, scale: Any
) -> Any:
    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        sign, rest, eight = (ir.Constant(_SHORTS, [n] * _WIDTH) for n in (0x80, 0x7F, 8))
        whole = ir.Constant(_SHORTS, [0xFF] * _WIDTH)
        factor, left = _splat(builder, args[5], _FLOATS), _short(builder, args[4])
        out = args[0]
        for row in range(_WIDTH):
            code = _field(builder, _row(builder, args[2], row), args[3], whole)
            upper = builder.shl(builder.and_(code, sign), eight)
            lower = builder.shl(builder.and_(code, rest), left)
            halves = builder.bitcast(builder.or_(upper, lower), _HALVES)
            result = builder.fmul(builder.fpext(halves, _FLOATS), factor)
            builder.store(result, builder.inttoptr(out, _FLOATS.as_pointer()), align=4)
            out = builder.add(out, args[1])
        return context.get_dummy_value()

    return types.none(*[types.int64] * 5, types.float32), codegen


def bind() -> None:
    """Bind the names of the dialect to compiler intrinsics."""
    jit.array = intrinsic(_array_at)
    jit.address_of = intrinsic(_address_of)
    jit.affine8x8 = intrinsic(_affine8x8(by_rows=True))
    jit.affine8x8_columns = intrinsic(_affine8x8(by_rows=False))
    jit.minifloat8x8 = intrinsic(_minifloat8x8)
    jit.half_to_float = intrinsic(_half_to_float)
    jit.float_to_half = intrinsic(_float_to_half)
    jit.bits_to_float = intrinsic(_bits_to_float)
    jit.float_to_bits = intrinsic(_float_to_bits)
    jit.bits_to_double = intrinsic(_bits_to_double)
    jit.fma = intrinsic(_fma)
    jit.atomic_add = intrinsic(_atomic_add)
