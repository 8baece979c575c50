"""Numbers of schemas: the library holds bounds as doubles and writes them as int64, so others would change unnoticed.

A bound moves inward, to the next number that the library holds. An `enum` or `const` whose number it does not hold is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Any

from penstock.gpu_node.engine.structured.schema.document import UnenforceableError
from penstock.gpu_node.engine.structured.schema.facts import declared_types

LARGEST = (1 << 63) - 1024
"""The largest double that is an int64. The library's ranges end there, and so do its listed whole numbers."""
MAX_STEP = (1 << 32) - 1
"""The library holds `multipleOf` as a uint32 with a decimal exponent."""
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_KEYWORDS = frozenset((*_LOWER, *_UPPER, "multipleOf"))
_LEAST = ("minLength", "minItems", "minProperties")
_MOST = ("maxLength", "maxItems", "maxProperties")
MAX_SIZE = (1 << 31) - 1
"""The library's largest size of a text. No answer is so long."""
_WHOLE_DOUBLES = 1 << 53
"""Doubles hold every whole number up to this one."""
_LONE_BOUND = 10**18
"""The library takes a lower bound without an upper one, and the reverse, only below this magnitude."""
_MAX_DECIMALS = 22
"""A number of fewer digits than 2^53 with so many decimals is read exactly: one division of two exact doubles."""
_NUM_DIGITS = 15
_ULPS_TRIED = 4
_SHOWN_CHARS = 60
_AS_STRING = "give it as a string"


def check_listed(keyword: str, value: Any, path: str) -> Any:
    """Return the value of an `enum` or `const` as the library keeps it: whole numbers without a fraction.

    Raises UnenforceableError for a number that it would change.
    """
    if isinstance(value, list):
        return [check_listed(keyword, one, f"{path}/{i}") for i, one in enumerate(value)]
    if isinstance(value, dict):
        return {name: check_listed(keyword, one, f"{path}/{name}") for name, one in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if isinstance(value, float) and not value.is_integer():
        if _is_held(value):
            return value
    elif -LARGEST <= value <= LARGEST and len({*_meanings(value), Fraction(float(value))}) == 1:
        return int(value)
    raise UnenforceableError(
        keyword, path, f"the number {_shown(value)} cannot be kept to its last digit; {_AS_STRING}"
    )


def with_held_numbers(given: dict[str, Any], path: str) -> tuple[dict[str, Any], list[Any]]:
    """Return a schema with bounds and a `multipleOf` that the library holds, and what must hold besides.

    The new bounds lie within the given ones. Raises UnenforceableError if there are none. Values of wrong types stay,
    because the library refuses them.
    """
    types, kind = declared_types(given), given.get("type", "")
    if not _KEYWORDS & given.keys() or not types & {"integer", "number"} or not isinstance(kind, str | list):
        return given, []
    if any(_is_wrong(keyword, given[keyword]) for keyword in _KEYWORDS & given.keys()):
        return given, []
    rest = {keyword: value for keyword, value in given.items() if keyword not in _KEYWORDS}
    step = _step_of(given, path)
    is_whole = "number" not in types
    if step is not None and not is_whole and step.denominator == 1:
        # Every multiple is whole. As a number the library would also write it with a fraction of zeros.
        is_whole, rest["type"] = True, sorted(types - {"number"})
    if is_whole:
        # A whole number is a multiple of p/q, in lowest terms, exactly if it is one of p.
        return rest | _whole_range(given, 1 if step is None else step.numerator, path), []
    held = {} if step is None else {"multipleOf": _held_step(step, given["multipleOf"], path)}
    found, besides = _range(given, path), list[Any]()
    for keyword, side in (("minimum", -1), ("maximum", 1)):
        if keyword in found and (shorter := _shorter(found[keyword] * side)):
            besides.append({"anyOf": [{keyword: found.pop(keyword)}, {"enum": [one * side for one in shorter]}]})
    return rest | held | found, besides


def _shorter(bound: float) -> list[float]:
    """Return the positive numbers that are a bound with fewer decimals.

    They lie within it, but the library takes a decimal fraction that begins like its bound only if it ends so too.
    """
    whole, _, decimals = format(Decimal(repr(bound)), "f").partition(".")
    return [float(f"{whole}.{decimals[:i]}") for i in range(1, len(decimals)) if bound > 0 and decimals[i - 1] != "0"]


def with_held_sizes(given: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with sizes as the library takes them: without a fraction of zeros, and not above MAX_SIZE."""
    held = {}
    for keyword in given.keys() & {*_LEAST, *_MOST}:
        value = given[keyword]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if keyword in _MOST and isinstance(value, int | float) and value > MAX_SIZE:
            value = MAX_SIZE
        held[keyword] = value
    return given | held if held else given


def check_steps(root: Any, path: str = "#") -> None:
    """Refuse values of `multipleOf` that the library cannot combine, if the schemas are such that it might have to."""
    steps = {_decimal_step(step) for step in _steps(root)} - {None}
    exponents = [exponent for _, exponent in filter(None, steps)]
    scaled = sorted(
        (value * 10 ** (max(exponents) - exponent) for value, exponent in filter(None, steps)), reverse=True
    )
    if len(scaled) > 1 and scaled[0] * scaled[1] > MAX_STEP and _combines(root):
        raise UnenforceableError("multipleOf", path, "values of several schemas have too many digits to be combined")


def _steps(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if "multipleOf" in value:
                yield value["multipleOf"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _combines(root: Any) -> bool:
    """Whether some schema of the document may apply to the same number as another one."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.keys() & {"allOf", "anyOf", "oneOf", "if", "not", "$ref", "patternProperties"}:
                return True
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return False


def _is_wrong(keyword: str, value: Any) -> bool:
    if isinstance(value, bool):
        return not keyword.startswith("exclusive")
    return not isinstance(value, int | float) or value != value


def _step_of(given: dict[str, Any], path: str) -> Fraction | None:
    if "multipleOf" not in given:
        return None
    value = given["multipleOf"]
    if not 0 < value < math.inf:
        raise UnenforceableError("multipleOf", path, f"it must be a number above 0, not {_shown(value)}")
    return Fraction(Decimal(repr(value)))


def _held_step(step: Fraction, value: float, path: str) -> float:
    """Return a double that the library reads as exactly this step, which may be a neighbor of the given one."""
    low = high = value
    for _ in range(_ULPS_TRIED):
        for near in (low, high):
            held = _decimal_step(near)
            if held is not None and _is_held(near) and Fraction(held[0], 10 ** held[1]) == step:
                return near
        low, high = math.nextafter(low, 0.0), math.nextafter(high, math.inf)
    raise UnenforceableError("multipleOf", path, f"the number {_shown(value)} has too many digits")


def _decimal_step(value: Any) -> tuple[int, int] | None:
    """Return the whole number and the decimal exponent as which the library reads a `multipleOf`; None if it cannot."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_STEP:
        return None
    coefficient, exponent = float(value), 0
    while not coefficient.is_integer():
        coefficient, exponent = coefficient * 10, exponent + 1
    return (int(coefficient), exponent) if coefficient <= MAX_STEP else None


def _whole_range(given: dict[str, Any], step: int, path: str) -> dict[str, float]:
    if step > MAX_STEP:
        raise UnenforceableError("multipleOf", path, f"a step above {MAX_STEP} cannot be enforced")
    found: dict[str, float] = {}
    for side, low, is_open in _bounds(given):
        least = math.floor(low) + 1 if is_open else math.ceil(low)
        keyword, held = ("minimum" if side > 0 else "maximum"), _held_whole(least, step) * side
        found[keyword] = max(found.get(keyword, held) * side, held * side) * side
    found = _with_both(found, _held_whole(-LARGEST, step))
    return _checked(found, given, path) | ({"multipleOf": step} if step > 1 else {})


def _held_whole(least: int, step: int) -> int:
    """Return the lowest multiple from a number on that is a double, and whose quotient by the step is one."""
    least = max(least, -LARGEST)
    shift = max(0, abs(least).bit_length() - _WHOLE_DOUBLES.bit_length() + 1)
    while True:
        grain = step << shift
        found = -(-least // grain) * grain
        if found > LARGEST or abs(found) >> shift <= _WHOLE_DOUBLES:
            return found
        shift += 1


def _range(given: dict[str, Any], path: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for side, low, is_open in _bounds(given):
        keyword, held = ("minimum" if side > 0 else "maximum"), _held_from(low, is_open=is_open) * side
        found[keyword] = max(found.get(keyword, held) * side, held * side) * side
    return _checked(_with_both(found, -LARGEST), given, path)


def _held_from(low: Fraction, *, is_open: bool) -> float:
    """Return the lowest number from `low` on, or above it, that the library holds."""
    low = max(low, Fraction(-LARGEST))
    if low > LARGEST:
        return math.ceil(low)
    if abs(low) >= _WHOLE_DOUBLES:
        found = float(low)
        while not all(meaning > low or (meaning == low and not is_open) for meaning in _meanings(found)):
            found = math.nextafter(found, math.inf)
        return int(found)
    near = float(low)
    if is_open:
        # A reader of doubles would round the digits of a lower number to the bound itself.
        return _short(_decimal(math.nextafter(near, math.inf)))
    if low.denominator == 1:
        return int(low)
    return near if _decimal(near) == low and _is_held(near) else _short(low)


def _short(low: Fraction) -> float:
    """Return the lowest number of few digits from `low` on."""
    digits = Context(prec=_NUM_DIGITS, rounding=ROUND_CEILING)
    short = digits.divide(Decimal(low.numerator), Decimal(low.denominator))
    short = short.quantize(Decimal(1).scaleb(-_MAX_DECIMALS), rounding=ROUND_CEILING, context=Context(prec=60))
    return int(short) if short == short.to_integral_value() else float(short)


def _bounds(given: dict[str, Any]) -> Iterator[tuple[int, Fraction, bool]]:
    """Yield (side, bound times side, whether the bound is excluded). The side is 1 for a lower bound, else -1."""
    for side, (closed, opened) in ((1, _LOWER), (-1, _UPPER)):
        for keyword in (closed, opened):
            value = given.get(keyword)
            if value is not None and not isinstance(value, bool):
                # In draft 4 the keyword that excludes is true or false.
                is_open = keyword == opened or given.get(opened) is True
                yield side, max(meaning * side for meaning in _meanings(value)), is_open


def _with_both(found: dict[str, float], lowest: float) -> dict[str, float]:
    """Return bounds with the one that the library needs beside a bound of large magnitude."""
    if "minimum" in found and "maximum" not in found and found["minimum"] >= _LONE_BOUND:
        return found | {"maximum": -lowest}
    if "maximum" in found and "minimum" not in found and found["maximum"] <= -_LONE_BOUND:
        return found | {"minimum": lowest}
    return found


def _checked(found: dict[str, float], given: dict[str, Any], path: str) -> dict[str, float]:
    low, high = found.get("minimum"), found.get("maximum")
    if low is not None and high is not None and low > high:
        least = {side: max((low for at, low, _ in _bounds(given) if at == side), default=None) for side in (1, -1)}
        if least[1] is None or least[-1] is None or least[1] < -least[-1] or least[1] == -least[-1]:
            keyword = next(name for name in (*_LOWER, *_UPPER) if name in given)
            reason = f"no number within its bounds can be kept to its last digit; {_AS_STRING}"
            raise UnenforceableError(keyword, path, reason)
        # No value satisfies the given bounds either, as the library will say.
        return found | {"minimum": min(low, LARGEST + 1024), "maximum": max(high, -LARGEST - 1024)}
    return found


def _meanings(value: float) -> set[Fraction]:
    """Return what a number means: its digits, and for a large double also its exact value, which readers may take."""
    if isinstance(value, int):
        return {Fraction(value)}
    if abs(value) == math.inf:
        return {Fraction(10**400 if value > 0 else -(10**400))}
    return {_decimal(value), Fraction(value)} if abs(value) >= _WHOLE_DOUBLES else {_decimal(value)}


def _decimal(value: float) -> Fraction:
    return Fraction(Decimal(repr(value)))


def _is_held(value: float) -> bool:
    """Whether the library certainly reads these digits as this double: by one division of two exact doubles."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    whole = int("".join(map(str, digits)))
    return isinstance(exponent, int) and -_MAX_DECIMALS <= exponent <= 0 and whole <= _WHOLE_DOUBLES


def _shown(value: float) -> str:
    if abs(value) == math.inf:
        return "beyond a double's range"
    shown = json.dumps(value)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"
