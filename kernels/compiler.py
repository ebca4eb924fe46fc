"""Turns a kernel's plain Python source into PTX for sm_90 with numba.cuda; needs no GPU and no driver.

It swaps the twins that a kernel uses for numba intrinsics (`device_code.py` says what the marks mean),
compiles, and keeps the PTX under a build directory, so that a later start needs no compiler. Called by
`launch.py` and by `scripts/check_ptx.py`; nothing else imports numba.
"""

from __future__ import annotations

import hashlib
import re
import types as python_types
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.device_code import Emitter, Op, Symbol, TracedSpec, tracing

COMPUTE_CAPABILITY = (9, 0)
PTX_VERSION = "9.0"
# Part of the cache key: the pinned tools write the same PTX for the same source.
TOOLCHAIN = "numba-cuda 0.30.4, nvvm 13.0"


@dataclass(frozen=True)
class Variant:
    """One compiled kernel: a plain function, the kinds of its scalar arguments, its launch shape.

    `args` has one letter per argument: `l` int64 (addresses), `r` int32, `f` float32.
    """

    name: str
    function: Callable[..., None]
    args: str
    num_threads: int
    _: KW_ONLY
    cluster: int = 1
    shared_bytes: int = 0
    # Blocks that should fit a multiprocessor: what limits the registers.
    blocks_per_sm: int = 1
    # Whether all blocks must run at a time, because some wait for others.
    is_together: bool = False
    # Values that the source does not show (what a factory closed over); part of the cache key.
    constants: tuple[Any, ...] = ()


@cache
def _source_digest(module: str) -> str:
    """A hash of the sources that a kernel of `module` is made of: any edit compiles anew."""
    digest = hashlib.sha256(TOOLCHAIN.encode())
    folder = Path(__file__).parent
    # What it imports of this package, and what those import.
    names, found = {"compiler", module.split(".")[-1]}, set[str]()
    while names - found:
        name = min(names - found)
        found.add(name)
        source = (folder / f"{name}.py").read_text()
        names |= set(re.findall(r"^ *from kernels\.(\w+) import", source, re.M))
        for some in re.findall(r"^ *from kernels import (\([^)]*\)|[\w, ]+)", source, re.M):
            names |= set(re.findall(r"\w+", some)) - {"emulator"}
    for name in sorted(found):
        digest.update(name.encode() + (folder / f"{name}.py").read_bytes())
    return digest.hexdigest()


def ptx_path(variant: Variant, build_dir: Path) -> Path:
    """Where the PTX of `variant` is kept."""
    source = _source_digest(variant.function.__module__)
    made_of = (
        source, variant.name, variant.args, variant.num_threads, variant.cluster, variant.blocks_per_sm, variant.constants
    )  # fmt: skip
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()
    return build_dir / f"{variant.name}-{key[:16]}.ptx"


def ptx_of(variant: Variant, build_dir: Path | None = None) -> str:
    """The PTX of `variant`, from `build_dir` if an equal source was compiled into it before."""
    if build_dir is None:
        return compile_ptx(variant)
    path = ptx_path(variant, build_dir)
    if path.exists():
        return path.read_text()
    ptx = compile_ptx(variant)
    build_dir.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{hashlib.sha256(ptx.encode()).hexdigest()[:8]}.tmp")
    partial.write_text(ptx)
    partial.replace(path)
    return ptx


def _numba() -> tuple[Any, Any]:
    """numba's cuda and types, which are not annotated."""
    from numba import cuda, types

    return cuda, types


def compile_ptx(variant: Variant) -> str:
    """Compile `variant`; its entry point is named `variant.name`."""
    cuda, types = _numba()
    kinds = {"l": types.int64, "r": types.int32, "f": types.float32}
    signature = types.void(*(kinds[kind] for kind in variant.args))
    function = _substitute(variant.function, {})
    ptx, _ = cuda.compile_ptx(function, signature, cc=COMPUTE_CAPABILITY)
    entry = re.search(r"\.visible \.entry (\w+)\(", ptx)
    if entry is None:
        raise RuntimeError(f"{variant.name}: no entry point in the PTX")
    ptx = str(ptx).replace(entry.group(1), variant.name)
    ptx = ptx.replace(
        ".address_size 64\n",
        ".address_size 64\n\n.extern .shared .align 1024 .b8 dynamic_shared[];\n",
        1,
    )
    if "wgmma." in ptx or "setmaxnreg." in ptx:
        # instructions of this very architecture, which no later one promises to have
        ptx = re.sub(r"^\.target sm_90$", ".target sm_90a", ptx, count=1, flags=re.M)
    return _with_launch_bound(ptx, variant)


def _with_launch_bound(ptx: str, variant: Variant) -> str:
    """Tell the assembler how many threads there are, so that it can give each its share of registers."""
    bound = f".maxntid {variant.num_threads}, 1, 1\n.minnctapersm {variant.blocks_per_sm}\n"
    return re.sub(r"(\.visible \.entry[^{]*?\))\s*\{", rf"\1\n{bound}{{", ptx, count=1, flags=re.S)


# --- source to numba -------------------------------------------------------------------------------


def _substitute(function: Callable[..., Any], done: dict[int, Any]) -> Any:
    """A copy of `function` whose twins are numba intrinsics."""
    code = function.__code__
    names = set(code.co_names)
    scope = dict(function.__globals__)
    for name in names & scope.keys():
        scope[name] = _device_value(scope[name], done)
    closure = tuple(
        python_types.CellType(_device_value(cell.cell_contents, done))
        for cell in function.__closure__ or ()
    )
    copy = python_types.FunctionType(code, scope, function.__name__, function.__defaults__, closure)
    copy.__module__ = function.__module__
    return copy


def _device_value(value: Any, done: dict[int, Any]) -> Any:
    if not callable(value):
        return value
    if id(value) in done:
        return done[id(value)]
    if hasattr(value, "device_op"):
        made = _op_intrinsic(value.device_op, value.__name__)
    elif hasattr(value, "device_traced"):
        made = _traced_intrinsic(value, value.device_traced)
    elif hasattr(value, "device_inline"):
        from numba import cuda

        made = cuda.jit(device=True, inline="always")(_substitute(value, done))
    else:
        return value
    done[id(value)] = made
    return made


def _numba_kinds(returns: str, is_tuple: bool) -> Any:
    from numba import types

    kinds = {"r": types.int32, "l": types.int64, "f": types.float32}
    if not returns:
        return types.void
    if not is_tuple:
        return kinds[returns]
    if len(set(returns)) == 1:
        return types.UniTuple(kinds[returns[0]], len(returns))
    return types.Tuple([kinds[kind] for kind in returns])


def _op_intrinsic(spec: Op, name: str) -> Any:
    return _intrinsic(
        name,
        len(spec.args),
        _numba_kinds(spec.returns, len(spec.returns) > 1),
        lambda emitter, args: emitter.call(spec, args),
    )


def _traced_intrinsic(function: Callable[..., Any], spec: TracedSpec) -> Any:
    return _intrinsic(
        function.__name__,
        spec.num_args,
        _numba_kinds(spec.returns, spec.is_tuple),
        lambda emitter, args: tracing(emitter, function, args),
    )


def _intrinsic(name: str, num_args: int, returns: Any, emit: Callable[..., Any]) -> Any:
    from numba import types
    from numba.cuda.extending import intrinsic

    def typing(typingctx: Any, args: tuple[Any, ...]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emitter = LlvmEmitter(builder)
            symbols = [
                emitter.from_numba(context, kind, value)
                for kind, value in zip(args, values, strict=True)
            ]
            result = emit(emitter, symbols)
            if returns is types.void:
                return context.get_dummy_value()
            if isinstance(returns, types.BaseTuple):
                parts = [
                    emitter.as_kind(part, kind).value
                    for part, kind in zip(result, _letters(returns), strict=True)
                ]
                return context.make_tuple(builder, returns, parts)
            return emitter.as_kind(result, _letters([returns])[0]).value

        return returns(*args), codegen

    # numba reads the number of arguments from the function, so it needs one of that very shape.
    names = ", ".join(f"a{i}" for i in range(num_args))
    scope: dict[str, Any] = {"typing": typing}
    exec(
        f"def {name}(typingctx, {names}):\n    return typing(typingctx, ({names}{',' * bool(names)}))",
        scope,
    )
    return intrinsic(scope[name])


def _letters(kinds: Any) -> list[str]:
    from numba import types

    table = {types.int32: "r", types.int64: "l", types.float32: "f"}
    return [table[kind] for kind in kinds]


class LlvmEmitter(Emitter):
    """Emits operations into an llvmlite builder."""

    def __init__(self, builder: Any) -> None:
        from llvmlite import ir

        self.ir = ir
        self.builder = builder
        self.llvm_kinds = {"r": ir.IntType(32), "l": ir.IntType(64), "f": ir.FloatType()}

    def from_numba(self, context: Any, kind: Any, value: Any) -> Any:
        """A symbol (or a tuple of them) for a value that numba passes."""
        _, types = _numba()

        if isinstance(kind, types.BaseTuple):
            return tuple(
                self.from_numba(context, part, self.builder.extract_value(value, i))
                for i, part in enumerate(kind)
            )
        if isinstance(kind, types.Literal):
            if isinstance(kind.literal_value, int):
                return int(kind.literal_value)
        if isinstance(kind, types.Boolean):
            return Symbol(self, "r", self.builder.zext(value, self.llvm_kinds["r"]))
        if isinstance(kind, types.Float):
            if kind.bitwidth != 32:
                raise TypeError("device code is float32 only: a Python float constant got in")
            return Symbol(self, "f", value)
        if isinstance(kind, types.Integer):
            symbol = Symbol(self, "l" if kind.bitwidth == 64 else "r", value)
            if kind.bitwidth < 32:
                symbol = Symbol(self, "r", self.builder.sext(value, self.llvm_kinds["r"]))
            return symbol
        raise TypeError(f"device code cannot take a {kind}")

    def as_kind(self, value: Any, kind: str) -> Symbol:
        """`value` as a symbol of `kind`; integers are widened or cut."""
        if not isinstance(value, Symbol):
            if kind == "f":
                return Symbol(self, "f", self.ir.Constant(self.llvm_kinds["f"], float(value)))
            mask = (1 << (32 if kind == "r" else 64)) - 1
            return Symbol(self, kind, self.ir.Constant(self.llvm_kinds[kind], int(value) & mask))
        if value.kind == kind:
            return value
        if (value.kind, kind) == ("r", "l"):
            return Symbol(self, kind, self.builder.sext(value.value, self.llvm_kinds["l"]))
        if (value.kind, kind) == ("l", "r"):
            return Symbol(self, kind, self.builder.trunc(value.value, self.llvm_kinds["r"]))
        raise TypeError(f"a value of kind {value.kind} cannot become {kind}")

    _FLOAT_TEXT = {
        "add": "add.rn.f32 $0, $1, $2;",
        "sub": "sub.rn.f32 $0, $1, $2;",
        "mul": "mul.rn.f32 $0, $1, $2;",
    }

    def binary(self, name: str, a: Any, b: Any) -> Symbol:
        kinds = {x.kind for x in (a, b) if isinstance(x, Symbol)}
        if "f" in kinds:
            if name not in self._FLOAT_TEXT:
                raise TypeError(f"{name} is not a float operation")
            result = self.call(Op("f", "ff", self._FLOAT_TEXT[name], False, False), (a, b))
            assert isinstance(result, Symbol)
            return result
        kind = "l" if "l" in kinds else "r"
        left, right = self.as_kind(a, kind), self.as_kind(b, kind)
        return Symbol(self, kind, getattr(self.builder, name)(left.value, right.value))

    def call(self, op: Op, args: Sequence[Any]) -> Any:
        ir = self.ir
        values = [self.as_kind(arg, kind).value for arg, kind in zip(args, op.args, strict=True)]
        # Division by a constant becomes a multiplication only if LLVM sees it.
        if op.text.startswith(("div.u32", "rem.u32")):
            name = "udiv" if op.text.startswith("div") else "urem"
            return Symbol(self, "r", getattr(self.builder, name)(*values))
        outputs = [self.llvm_kinds[kind] for kind in op.returns]
        if not outputs:
            result_type: Any = ir.VoidType()
        elif len(outputs) == 1:
            result_type = outputs[0]
        else:
            result_type = ir.LiteralStructType(outputs)
        function = ir.FunctionType(result_type, [self.llvm_kinds[kind] for kind in op.args])
        free = len(op.returns) - op.tied
        constraints = ",".join(
            # several instructions may write a result before they read an argument
            [
                f"=&{kind}" if op.text.count(";") > 1 and i < free else f"={kind}"
                for i, kind in enumerate(op.returns)
            ]
            + [str(free + i) if i < op.tied else kind for i, kind in enumerate(op.args)]
            + (["~{memory}"] if op.touches_memory else [])
        )
        asm = ir.InlineAsm(function, op.text, constraints, side_effect=op.is_volatile)
        result = self.builder.call(asm, values)
        if not outputs:
            return None
        if len(outputs) == 1:
            return Symbol(self, op.returns, result)
        return tuple(
            Symbol(self, kind, self.builder.extract_value(result, i))
            for i, kind in enumerate(op.returns)
        )
