"""The few machine operations that the CPU kernels are made of, as numba intrinsics.

Owns: the product tile, exp, log, fused multiply-add and the 32-bit hash, each with one fixed order of operations, so that a
result depends on nothing but its own operands: not on the number of rows, their place, the thread, or the vectors' width.
Knows nothing of models, caches or batches. Called by the `kernels.cpu*` modules only.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16  # floats per vector value; LLVM splits it where the machine's vectors are narrower
HAS_WIDE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))

_f32, _i32, _i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_vector = ir.VectorType(_f32, LANES)


def _call(builder: Any, name: str, kind: ir.Type, *operands: Any) -> Any:
    suffix = f"v{LANES}f32" if kind is _vector else "f32"
    signature = ir.FunctionType(kind, [kind] * len(operands))
    function = cgutils.get_or_insert_function(builder.module, signature, f"{name}.{suffix}")
    return builder.call(function, operands)


def _polynomial(builder: Any, x: Any, coefficients: tuple[float, ...]) -> Any:
    """Horner's rule, highest power first."""
    y: Any = ir.Constant(_f32, coefficients[0])
    for c in coefficients[1:]:
        y = _call(builder, "llvm.fma", _f32, y, x, ir.Constant(_f32, c))
    return y


def _product_tile(num_rows: int, num_vectors: int) -> Any:
    """An intrinsic `tile(x, ldx, w, ldw, depth, out, ldo, scales, like)` over raw addresses and row strides in elements.

    out[m, n] += sum over k < depth of x[m, k] * w[k, n] for `num_rows` x (`num_vectors` * LANES) elements, each one chain of
    fused multiply-adds in ascending k that starts from out. The accumulators stay in registers. x and out are fp32; w is what the
    array `like` holds: float32, int16 (the bits of fp16), uint16 (of bf16), or int8 times the fp32 `scales[n]`, rounded to fp32 before
    it multiplies: the same bits as with the weight converted beforehand.
    """

    @intrinsic
    def tile(typingctx, x, ldx, w, ldw, depth, out, ldo, scales, like):  # type: ignore[no-untyped-def]
        element = like.dtype

        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            x, ldx, w, ldw, depth, out, ldo, scales, _ = args
            cells = [(m, v) for m in range(num_rows) for v in range(num_vectors)]

            def constant(value: int) -> Any:
                return ir.Constant(_i64, value)

            def at(base: Any, offset: Any, kind: ir.Type, size: int = 4) -> Any:
                address = builder.add(base, builder.mul(offset, constant(size)))
                return builder.inttoptr(address, kind.as_pointer())

            def cell(m: int, v: int) -> Any:
                offset = builder.add(builder.mul(ldo, constant(m)), constant(v * LANES))
                return at(out, offset, _vector)

            def weights(k: Any, v: int) -> Any:
                offset = builder.add(builder.mul(k, ldw), constant(v * LANES))
                if element == types.float32:
                    return builder.load(at(w, offset, _vector), align=4)
                if element == types.int8:
                    raw = builder.load(
                        at(w, offset, ir.VectorType(ir.IntType(8), LANES), 1), align=1
                    )
                    whole = builder.sitofp(builder.sext(raw, ir.VectorType(_i32, LANES)), _vector)
                    return builder.fmul(whole, factors[v])
                raw = builder.load(at(w, offset, ir.VectorType(ir.IntType(16), LANES), 2), align=2)
                if element == types.int16:
                    return builder.fpext(
                        builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), _vector
                    )
                wide = builder.zext(raw, ir.VectorType(_i32, LANES))
                return builder.bitcast(
                    builder.shl(wide, ir.Constant(ir.VectorType(_i32, LANES), [16] * LANES)),
                    _vector,
                )

            factors = []
            if element == types.int8:
                factors = [
                    builder.load(at(scales, constant(v * LANES), _vector), align=4)
                    for v in range(num_vectors)
                ]
            first = [builder.load(cell(m, v), align=4) for m, v in cells]
            before = builder.block
            loop, done = builder.append_basic_block("k"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_signed(">", depth, constant(0)), loop, done)

            builder.position_at_end(loop)
            k = builder.phi(_i64)
            k.add_incoming(constant(0), before)
            sums = [builder.phi(_vector) for _ in cells]
            ws = [weights(k, v) for v in range(num_vectors)]
            undefined = ir.Constant(_vector, ir.Undefined)
            lanes = ir.Constant(ir.VectorType(_i32, LANES), [0] * LANES)
            after = []
            for m in range(num_rows):
                offset = builder.add(builder.mul(ldx, constant(m)), k)
                value = builder.load(at(x, offset, _f32), align=4)
                value = builder.insert_element(undefined, value, ir.Constant(_i32, 0))
                value = builder.shuffle_vector(value, undefined, lanes)
                for v in range(num_vectors):
                    total = sums[m * num_vectors + v]
                    after.append(_call(builder, "llvm.fma", _vector, value, ws[v], total))
            following = builder.add(k, constant(1))
            k.add_incoming(following, loop)
            for total, start, new in zip(sums, first, after, strict=True):
                total.add_incoming(start, before)
                total.add_incoming(new, loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, done)

            builder.position_at_end(done)
            results = [builder.phi(_vector) for _ in cells]
            for result, start, new in zip(results, first, after, strict=True):
                result.add_incoming(start, before)
                result.add_incoming(new, loop)
            for (m, v), result in zip(cells, results, strict=True):
                builder.store(result, cell(m, v), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8, like), codegen

    return tile


tile_8x2, tile_4x2, tile_2x2, tile_1x2 = (_product_tile(m, 2) for m in (8, 4, 2, 1))
tile_4x4, tile_2x4, tile_1x4 = (_product_tile(m, 4) for m in (4, 2, 1))
tile_4x1, tile_1x1 = (_product_tile(m, 1) for m in (4, 1))


@intrinsic
def fma(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c in fp32 with one rounding."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return _call(builder, "llvm.fma", _f32, *args)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def exp(typingctx, x):  # type: ignore[no-untyped-def]
    """e**x in fp32, within 2 units in the last place on [-87, 88] and clamped to the ends outside."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def f(value: float) -> Any:
            return ir.Constant(_f32, value)

        (x,) = args
        x = builder.select(builder.fcmp_ordered("<", x, f(-87.0)), f(-87.0), x)
        x = builder.select(builder.fcmp_ordered(">", x, f(88.0)), f(88.0), x)
        magic = f(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, kept in the low bits
        rounded = _call(builder, "llvm.fma", _f32, x, f(1.4426950216293335), magic)
        n = builder.fsub(rounded, magic)
        r = _call(builder, "llvm.fma", _f32, n, f(-0.693145751953125), x)
        r = _call(builder, "llvm.fma", _f32, n, f(-1.428606765330187e-06), r)
        p = _polynomial(builder, r, (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0))
        exponent = builder.shl(builder.bitcast(rounded, _i32), ir.Constant(_i32, 23))
        return builder.bitcast(builder.add(builder.bitcast(p, _i32), exponent), _f32)

    return types.float32(types.float32), codegen


@intrinsic
def log(typingctx, x):  # type: ignore[no-untyped-def]
    """Natural logarithm in fp32 of a positive normal number, within 2 units in the last place (also close to 1)."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def f(value: float) -> Any:
            return ir.Constant(_f32, value)

        def i(value: int) -> Any:
            return ir.Constant(_i32, value)

        bits = builder.bitcast(args[0], _i32)
        # the exponent is taken so that the mantissa lies in [sqrt(1/2), sqrt(2))
        shifted = builder.sub(bits, i(0x3F3504F3))
        n = builder.ashr(shifted, i(23))
        mantissa = builder.bitcast(builder.sub(bits, builder.shl(n, i(23))), _f32)
        m = builder.fsub(mantissa, f(1.0))
        p = _polynomial(
            builder,
            m,
            (
                7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
                -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
            ),
        )  # fmt: skip
        square = builder.fmul(m, m)
        e = builder.sitofp(n, _f32)
        y = builder.fmul(builder.fmul(p, m), square)
        y = _call(builder, "llvm.fma", _f32, e, f(-2.12194440e-4), y)
        y = _call(builder, "llvm.fma", _f32, square, f(-0.5), y)
        y = builder.fadd(y, m)
        return _call(builder, "llvm.fma", _f32, e, f(0.693359375), y)

    return types.float32(types.float32), codegen


@intrinsic
def hash_uniform(typingctx, low, high, counter):  # type: ignore[no-untyped-def]
    """The uniform number of (key, counter), in (0, 1): 23 hashed bits plus one half, over 2**23.

    `low`, `high` are the key's 32-bit halves; the hash mixes the counter twice, keyed before each time.
    """

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        def i(value: int) -> Any:
            return ir.Constant(_i32, value)

        def mix(h: Any) -> Any:
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                h = builder.mul(builder.xor(h, builder.lshr(h, i(shift))), i(factor))
            return builder.xor(h, builder.lshr(h, i(16)))

        low, high, counter = args
        h = mix(builder.add(builder.mul(counter, i(0x9E3779B9)), low))
        h = mix(builder.xor(h, high))
        bits = builder.uitofp(builder.lshr(h, i(9)), _f32)
        return builder.fmul(builder.fadd(bits, ir.Constant(_f32, 0.5)), ir.Constant(_f32, 2.0**-23))

    return types.float32(types.uint32, types.uint32, types.uint32), codegen


@intrinsic
def address(typingctx, array):  # type: ignore[no-untyped-def]
    """The address of an array's first element."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        value = context.make_array(signature.args[0])(context, builder, args[0])
        return builder.ptrtoint(value.data, _i64)

    return types.int64(array), codegen


@intrinsic
def to_half(typingctx, x):  # type: ignore[no-untyped-def]
    """The bits of x, fp32, rounded to fp16 (to even; beyond its range to the largest), as int16."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        (x,) = args
        top = ir.Constant(_f32, 65504.0)
        bottom = ir.Constant(_f32, -65504.0)
        x = builder.select(builder.fcmp_ordered(">", x, top), top, x)
        x = builder.select(builder.fcmp_ordered("<", x, bottom), bottom, x)
        return builder.bitcast(builder.fptrunc(x, ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), codegen


@intrinsic
def from_half(typingctx, bits):  # type: ignore[no-untyped-def]
    """The fp32 value of fp16 bits given as int16."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), _f32)

    return types.float32(types.int16), codegen
