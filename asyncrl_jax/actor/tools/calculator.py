"""Arithmetic for a policy: whole numbers, fractions of them and decimals, exactly, within bounds that are stated."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction

MAX_CHARACTERS = 256
MAX_DIGITS = 64  # of a numerator or denominator, also in between
MAX_EXPONENT = 64

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: lambda a, b: Fraction(a % b),
}


def calculate(expression: str) -> Fraction:
    """Value of an expression of numbers, + - * / // % ** and parentheses; nothing else is understood.

    Raises:
      ValueError: saying what is wrong, in words for the policy: not an expression, too long, too large, division by 0.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    try:
        return _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(ast.unparse(node)))
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            return _value(operand) if isinstance(sign, ast.UAdd) else -_value(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _bounded(_power(_value(left), _value(right)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _bounded(_OPERATORS[type(op)](_value(left), _value(right)))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
        raise ValueError(f"an exponent is a whole number up to {MAX_EXPONENT}")
    return Fraction(base ** int(exponent))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"more than {MAX_DIGITS} digits")
    return value
