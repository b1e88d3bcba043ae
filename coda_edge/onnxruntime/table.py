"""Operators as the C tables that the library is made of; ``native/operators.h`` declares their types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..bundle.format import DTYPES
from .operators import Operator, Step, Tensor

_ORIGINS = {
    "input": "FROM_INPUT",
    "output": "FROM_OUTPUT",
    "workspace": "FROM_WORKSPACE",
    "constant": "FROM_CONSTANT",
    "weight": "FROM_WEIGHT",
}


def tables(operators: Mapping[str, Operator], features: Sequence[str], weights: Mapping[str, int]) -> str:
    """The C source that defines ``operators`` by name, the CPU ``features`` that their kernels need, and ``weights``: bytes by digest.

    The weights themselves are the symbols ``coda_weight_<digest>``.
    """
    kernels = {k for op in operators.values() for s in op.steps for k in (s.kernel, s.finish) if k}
    writer = _Writer()
    rows = [writer.operator(i, name, op) for i, (name, op) in enumerate(operators.items())]
    return "\n".join(
        [
            '#include "operators.h"',
            "",
            *(f"extern int32_t {k}(const uint64_t *buffers, const int64_t *ints);" for k in sorted(kernels)),
            *(f"extern const uint8_t coda_weight_{w}[];" for w in weights),
            "",
            *writer.lines,
            f"const coda_operator CODA_OPERATORS[] = {_braces([*rows, '{0}'])};",
            f"const uint32_t CODA_OPERATOR_COUNT = {len(rows)};",
            f"coda_custom_op CODA_CUSTOM_OPS[{len(rows) + 1}];",
            f"const coda_weight CODA_WEIGHTS[] = {_braces([*(_weight(w, n) for w, n in weights.items()), '{0}'])};",
            f"const char *const CODA_FEATURES[] = {_braces([*map(_text, features), 'NULL'])};",
            "",
        ]
    )


class _Writer:
    """The arrays that operators point to, as lines of C."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def operator(self, number: int, name: str, op: Operator) -> str:
        """The initializer of one operator."""
        prefix = f"op{number}"
        sizes = [_braces([str(int(e.op)), _int64(e.a), _int64(e.b)]) for e in op.sizes.entries]
        constants = [self._bytes(f"{prefix}_constant{i}", data) for i, data in enumerate(op.constants)]
        required = [_braces([str(int(r.equal)), str(r.left), str(r.right), _text(r.text)]) for r in op.required]
        fields = [
            _text(name),
            self._tensors(f"{prefix}_inputs", op.inputs),
            self._tensors(f"{prefix}_outputs", op.outputs),
            f"{len(op.inputs)}, {len(op.outputs)}",
            *self._counted("coda_symbol", f"{prefix}_symbols", [_braces(map(str, place)) for place in op.symbols]),
            *self._counted("coda_size", f"{prefix}_sizes", sizes),
            *self._counted("uint32_t", f"{prefix}_workspaces", map(str, op.workspaces)),
            self._array("void *const", f"{prefix}_constants", constants),
            *self._counted("uint64_t", f"{prefix}_weights", map(str, op.weights)),
            *self._counted(
                "coda_step", f"{prefix}_steps", [self._step(f"{prefix}_step{i}", s) for i, s in enumerate(op.steps)]
            ),
            *self._counted("coda_constraint", f"{prefix}_constraints", required),
        ]
        return _braces(fields)

    def _array(self, kind: str, name: str, items: Iterable[str]) -> str:
        """Defines a constant array; returns what points to it."""
        items = list(items)
        if not items:
            return "NULL"
        self.lines.append(f"static const {kind} {name}[] = {_braces(items)};")
        return name

    def _counted(self, kind: str, name: str, items: Iterable[str]) -> tuple[str, str]:
        items = list(items)
        return self._array(kind, name, items), str(len(items))

    def _tensors(self, name: str, tensors: Sequence[Tensor]) -> str:
        rows = []
        for i, t in enumerate(tensors):
            dims = self._array("uint32_t", f"{name}{i}", map(str, t.dims))
            rows.append(_braces([_text(t.name), str(DTYPES[t.dtype]), str(len(t.dims)), dims]))
        return self._array("coda_tensor", name, rows)

    def _step(self, name: str, step: Step) -> str:
        operands = [_braces([_ORIGINS[o.origin], str(o.index)]) for o in step.operands]
        return _braces(
            [
                _text(step.name),
                step.kernel,
                step.finish or "NULL",
                *self._counted("coda_operand", f"{name}_operands", operands),
                *self._counted("uint32_t", f"{name}_ints", map(str, step.ints)),
                str(step.items),
                str(step.scratch),
                str(step.grain),
            ]
        )

    def _bytes(self, name: str, data: bytes) -> str:
        self.lines.append(f"static const _Alignas(ALIGNMENT) uint8_t {name}[] = {_braces(map(str, data))};")
        return name


def _braces(items: Iterable[str]) -> str:
    return "{" + ", ".join(items) + "}"


def _weight(digest: str, size: int) -> str:
    return _braces([_text(digest), f"coda_weight_{digest}", str(size)])


def _int64(value: int) -> str:
    return f"INT64_C({value})" if value > -(2**63) else "INT64_MIN"


def _text(text: str) -> str:
    """A C string literal of printable characters and octal escapes."""
    plain = (chr(b) if 32 <= b < 127 and chr(b) not in '"\\?' else f"\\{b:03o}" for b in text.encode())
    return f'"{"".join(plain)}"'
