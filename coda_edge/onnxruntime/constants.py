"""Constants as kernels read them: what a node stores in place of a constant input, and the standard operators that undo it.

A kernel's layout is a model's initializer, which the library reads where onnxruntime has it. Where there is no library, the function's body
begins with what makes the plain constant of it, which onnxruntime folds when a session is made.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from onnx import NodeProto, TensorProto, numpy_helper

from ..epilogue.onnx import Emitter
from ..ir import Array
from ..lower.kernel import Packed
from ..lower.tables import readable
from ..lower.weights import WeightFormat
from ..weights import Blocks, FactoredConstant, Weight, weight_of

_END = 2**63 - 1
_BITS = {"int4": 8, "uint4": 0}
"""Of whole numbers of 4 bits, what is added to them where they are stored."""
_NIBBLE = 4


@dataclass(frozen=True, eq=False)
class Layout:
    """What stands for a constant input of a node: ``parts`` by what they hold (``""``: the numbers), in the kernels' layout."""

    tensor: gs.Constant
    parts: dict[str, Array]
    orders: Sequence[Sequence[int]] = ()
    """Of panels: the columns of each."""

    def undo(self, names: Sequence[str], result: str) -> list[NodeProto]:
        """Nodes that make the constant, called ``result``, of the parts, which are called ``names``."""
        emitter = Emitter(f"{result}_")
        given = dict(zip(self.parts, names, strict=True))
        if self.orders:
            value = _panels(emitter, given, weight_of(self.tensor), self)
        elif isinstance(self.tensor, FactoredConstant) and readable(self.tensor.weight):
            value = _table(emitter, given, self.tensor.weight)
        else:
            shape = [int(d) for d in self.tensor.shape]
            value = _reshape(emitter, _real(emitter, given[""], self.parts[""]), shape)
        emitter.name_results([value], [result])
        return emitter.nodes


def digest(values: Array) -> str:
    """Sixteen hex digits of a constant: dtype, shape and bytes."""
    found = hashlib.sha256(f"{values.dtype.name} {values.shape} ".encode())
    found.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
    return found.hexdigest()[:16]


def part_of(packed: Packed, node: gs.Node) -> tuple[int, str] | None:
    """Which constant input of ``node`` a kernel's constant was made of, and which part of it that is; None: of none."""
    name = f"{node.name}.weight"
    if node.op in ("Gemm", "GroupedConv") and (packed.name == name or packed.name.startswith(f"{name}.")):
        return 1, packed.name[len(name) + 1 :]
    for position, tensor in enumerate(node.inputs):
        if isinstance(tensor, gs.Constant):
            if packed.name == tensor.name and _describes(packed, tensor):
                return position, ""
            part = packed.name.removeprefix(f"{tensor.name}.")
            if part in ("zero", "quantum") and isinstance(tensor, FactoredConstant) and readable(tensor.weight):
                return position, part
    return None


def _describes(packed: Packed, tensor: gs.Constant) -> bool:
    """Whether ``undo`` knows how a table's numbers are stored: as they are, or in half."""
    if isinstance(tensor, FactoredConstant) and readable(tensor.weight):
        return True
    values = np.asarray(tensor.values)
    return packed.data.size == values.size and np.array_equal(
        packed.data.astype(values.dtype).reshape(-1), values.reshape(-1)
    )


def _panels(emitter: Emitter, given: dict[str, str], weight: Weight, layout: Layout) -> str:
    """A weight ``[K, N]`` of what ``WeightFormat.packed`` makes of it."""
    k = int(layout.tensor.shape[0])
    form = WeightFormat.of(weight) if layout.parts[""].dtype != np.float32 else WeightFormat()
    numbers = _in_rows(emitter, given[""], layout.orders, -(-k // form.rows_per_element))
    if form.rows_per_element > 1:
        numbers = _fields(emitter, numbers, form, k, sum(map(len, layout.orders)))
    value = _real(emitter, numbers, layout.parts[""])
    groups = form.groups(k)

    def factors(part: str) -> str:
        spread = _in_rows(emitter, given[part], layout.orders, groups)
        spread = _real(emitter, spread, layout.parts[part])
        if groups == 1:
            return spread
        return emitter.node("Gather", spread, emitter.ints([row // form.group for row in range(k)]), axis=0)

    if form.zeros:
        value = emitter.node("Sub", value, factors("zeros"))
    elif form.bias:
        value = emitter.node("Sub", value, emitter.literal(float(form.bias), "f32"))
    if form.quanta:
        value = emitter.node("Mul", value, factors("quanta"))
    if form.scaled:
        value = emitter.node("Mul", value, emitter.node("Unsqueeze", given["scale"], emitter.ints([1])))
    if form.shifted:
        value = emitter.node("Sub", value, _in_order(emitter, given["offset"], layout.orders, 0))
    return value


def _in_rows(emitter: Emitter, flat: str, orders: Sequence[Sequence[int]], rows: int) -> str:
    """``[rows, N]`` of panels ``[rows, width]`` that lie one behind another."""
    width = len(orders[0])
    full = sum(len(order) == width for order in orders)
    rest = len(orders[-1]) if full < len(orders) else 0
    end = full * rows * width
    pieces = emitter.node("Slice", flat, emitter.ints([0]), emitter.ints([end])) if rest else flat
    if full > 1:
        pieces = emitter.node("Transpose", _reshape(emitter, pieces, [full, rows, width]), perm=[1, 0, 2])
    pieces = _reshape(emitter, pieces, [rows, full * width])
    if rest:
        last = emitter.node("Slice", flat, emitter.ints([end]), emitter.ints([_END]))
        pieces = emitter.node("Concat", pieces, _reshape(emitter, last, [rows, rest]), axis=1)
    return _in_order(emitter, pieces, orders, 1)


def _in_order(emitter: Emitter, value: str, orders: Sequence[Sequence[int]], axis: int) -> str:
    """Columns that lie as ``orders`` says, in order."""
    lying = np.concatenate([np.asarray(order) for order in orders])
    if np.array_equal(lying, np.arange(lying.size)):
        return value
    return emitter.node("Gather", value, emitter.ints(np.argsort(lying).tolist()), axis=axis)


def _fields(emitter: Emitter, words: str, form: WeightFormat, k: int, columns: int) -> str:
    """The rows ``[K, columns]`` in words of several."""
    shifts = np.arange(0, form.bits * form.rows_per_element, form.bits, dtype=np.uint32).reshape(-1, 1)
    mask = np.array((1 << form.bits) - 1, np.uint32)
    fields = _unpack(emitter, words, shifts, mask, [-1, columns])
    return emitter.node("Slice", fields, emitter.ints([0]), emitter.ints([k]))


def _unpack(emitter: Emitter, words: str, shifts: Array, mask: Array, dims: Sequence[int]) -> str:
    """The bits of each of ``words`` ``[n, …]`` behind each of ``shifts``, as rows ``[n·shifts, …]``."""
    apart = emitter.node("Unsqueeze", words, emitter.ints([1]))
    fields = emitter.node("BitShift", apart, _constant(emitter, shifts), direction="RIGHT")
    return _reshape(emitter, emitter.node("BitwiseAnd", fields, _constant(emitter, mask)), dims)


def _table(emitter: Emitter, given: dict[str, str], weight: Weight) -> str:
    """A table of whole numbers, as ``lower.tables`` stores it."""
    dims = [int(d) for d in weight.stored.shape]
    bias = _BITS.get(weight.stored.dtype.name)
    numbers = given[""]
    if bias is not None:
        shifts = np.array([0, _NIBBLE], np.uint8).reshape(-1, *[1] * (len(dims) - 1))
        numbers = _unpack(emitter, numbers, shifts, np.array(15, np.uint8), [-1, *dims[1:]])
        numbers = emitter.node("Slice", numbers, emitter.ints([0]), emitter.ints([dims[0]]))
    value = _cast(emitter, numbers)
    if weight.zero is not None:
        value = emitter.node("Sub", value, _spread(emitter, given.get("zero"), weight.zero, dims, bias or 0))
    elif bias:
        value = emitter.node("Sub", value, emitter.literal(float(bias), "f32"))
    if weight.quantum is None:
        return value
    return emitter.node("Mul", value, _spread(emitter, given.get("quantum"), weight.quantum, dims, 0))


def _spread(emitter: Emitter, name: str | None, blocks: Blocks, dims: Sequence[int], bias: int) -> str:
    """The number of each element's block, or what broadcasts to that; ``name`` is None for a single number."""
    if name is None:
        return emitter.literal(float(blocks.numbers.reshape(-1)[0] + np.float32(bias)), "f32")
    value = _cast(emitter, name)
    for axis, (size, dim) in enumerate(zip(blocks.sizes, dims, strict=True)):
        if 1 < size < dim:
            value = emitter.node("Gather", value, emitter.ints([i // size for i in range(dim)]), axis=axis)
    return value


def _reshape(emitter: Emitter, value: str, dims: Sequence[int]) -> str:
    return emitter.node("Reshape", value, emitter.ints(list(dims)))


def _cast(emitter: Emitter, value: str) -> str:
    return emitter.node("Cast", value, to=TensorProto.FLOAT)


def _real(emitter: Emitter, value: str, stored: Array) -> str:
    """Float32 of what may be stored in less."""
    return value if stored.dtype == np.float32 else _cast(emitter, value)


def _constant(emitter: Emitter, values: Array) -> str:
    return emitter.node("Constant", value=numpy_helper.from_array(values))
