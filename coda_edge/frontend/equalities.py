"""Sizes that a graph's operators need to be equal, solved for the later ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import sympy

from ..symbolic import Dim, simplify

#: What sizes, and whole terms of sizes, are known to be.
Known: TypeAlias = "dict[sympy.Expr, sympy.Expr]"

# What may be known as a whole where it cannot be solved for one size.
_WHOLE_TERMS = (sympy.floor, sympy.ceiling, sympy.Mod, sympy.Max, sympy.Min, sympy.Mul)


class Equalities:
    """Sizes that were assumed equal: each later symbol is an expression in earlier ones, in order of the inputs.

    A product, a quotient or the like that cannot be solved for a symbol is known as a whole, if it equals a number, if it is
    rounded and has to be what it is before rounding, or if it is the larger or smaller of two of which it has to be one.
    """

    def __init__(self, order: Iterable[sympy.Symbol]) -> None:
        self._rank = {s: i for i, s in enumerate(dict.fromkeys(order))}
        self.known: Known = {}

    def resolve(self, dim: Dim) -> Dim:
        """``dim`` with the known equalities put in."""
        if isinstance(dim, int) or not any(k.free_symbols & dim.free_symbols for k in self.known):
            return dim
        return simplify(dim.xreplace(self.known))

    def rename(self, dim: Dim) -> Dim:
        """``dim`` with the known values of symbols put in, but not those of whole terms: they hold only as long as they are checked."""
        symbols = {k: v for k, v in self.known.items() if isinstance(k, sympy.Symbol)}
        return dim if isinstance(dim, int) or not symbols else simplify(dim.xreplace(symbols))

    def equate(self, a: Dim, b: Dim) -> bool:
        """Assumes ``a = b`` by solving for their latest symbol, or for a term that is a number; False if neither can be."""
        difference = sympy.expand(sympy.sympify(self.resolve(a)) - sympy.sympify(self.resolve(b)))
        solutions = []
        for s in sorted(difference.free_symbols, key=lambda s: (self._rank.get(s, len(self._rank)), s.name))[::-1]:
            factor = difference.coeff(s)
            rest = sympy.expand(difference - factor * s)
            value = sympy.expand(-rest / factor) if factor in (1, -1) else None
            if value is not None and s not in rest.free_symbols and self._is_whole(value) and not value.is_negative:
                solutions.append((s, value))
        if not solutions:
            return self._equate_term(difference)
        # A sum is better than a difference, which might be negative.
        s, value = next((found for found in solutions if found[1].is_nonnegative), solutions[0])
        self.known = {k.xreplace({s: value}): v.xreplace({s: value}) for k, v in self.known.items()} | {s: value}
        return True

    def _is_whole(self, value: sympy.Expr) -> bool:
        """Whether ``value`` is an integer, given the quotients that are known to be."""
        for quotient in self.known.values():
            leading = next(iter(sorted(quotient.free_symbols, key=str)), None)
            if leading is not None and not quotient.is_integer:
                value = sympy.expand(value - value.coeff(leading) / quotient.coeff(leading) * quotient)
        return bool(value.is_integer)

    def _equate_term(self, difference: sympy.Expr) -> bool:
        """Assumes that ``difference`` is 0: a term less a number, a rounded quotient less itself, a largest or smallest less one of its arguments.

        A product of sizes is 1 only if each of them is.
        """
        for extreme in difference.atoms(sympy.Max, sympy.Min):
            factor = difference.coeff(extreme)
            for argument in extreme.args:
                if sympy.expand(difference - factor * (extreme - argument)) == 0:
                    self.known[extreme] = argument
                    return True
        for rounded in difference.atoms(sympy.floor, sympy.ceiling):
            exact = rounded.args[0]
            if sympy.expand(difference - difference.coeff(rounded) * (rounded - exact)) == 0:
                self.known[rounded] = exact
                return True
        number, term = difference.as_coeff_Add()
        factor, term = term.as_coeff_Mul()
        value = -number / factor
        if value == 1 and isinstance(term, sympy.Mul | sympy.Pow):
            return all(self.equate(base, 1) for base in term.as_powers_dict())
        if not isinstance(term, _WHOLE_TERMS) or not (term.is_integer and value.is_integer):
            return False
        self.known[term] = value
        return True
