"""Random schemas with numbers at every edge and all enforced formats: what the grammar accepts must be valid.

    python -m bench.random_schemas --count 20000 --seed 67

For each schema it walks at random through the texts that the grammar allows, and tries texts near the schema's bounds,
listed values and formats. The package jsonschema checks each text that the grammar accepts, with formats. It checks it
twice: with numbers as Python reads them, and with exact decimal numbers. A schema may also be refused, with a reason.
"""

from __future__ import annotations

import argparse
import decimal
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from penstock.gpu_node.engine.structured.schema.formats import ENFORCED_FORMATS
from penstock.gpu_node.engine.structured.tenant_grammar import reason_of
from penstock.gpu_node.engine.structured.worker import Compiler

COUNT = 20_000
SEED = 67
NUM_WALKS = 3
NUM_PROBES = 12
MAX_CHARS = 160
_END = 256
_DEEPEST = 3
_DIGITS = 2000
_SHOWN_FAILURES = 40
_QUOTED = re.compile(r"/.*/|'[^']*'| at #[^:]*:|-?\d[\d.e+-]*…?")
_TWO_53, _TWO_63 = 1 << 53, 1 << 63
EDGES: tuple[float, ...] = (
    *(0, 1, -1, 2, 5, 9, 10, 99, 100, 101, 255, 1000, -0.0, 0.5, -0.5, 1.5, 100.0),
    *(
        sign * base + step
        for base in (1 << 31, 1 << 32, _TWO_53, 10**18, 1 << 62, _TWO_63, 1 << 64)
        for sign in (1, -1)
        for step in (-1025, -1024, -2, -1, 0, 1, 2)
    ),
    *(0.1, 0.2, 0.3, 0.1 + 0.2, 0.07, 1 / 3, -2 / 3, 0.01, 1e-7, 5e-324, 2.2250738585072014e-308, 123.456, 99.99),
    *(1e15, 1e16, 1e17, 1e18, 1e19, 1e22, 1e23, 4.611686018427388e18, 9.223372036854775807e18, 1.7976931348623157e308),
    *(-1.7976931348623157e308, float("inf"), float("-inf"), 1098765432109876543, 12345678901234567, 10**30),
)
STEPS: tuple[float, ...] = (1, 2, 3, 7, 10, 64, 100, 4294967297, 10**12, 1.0, 2.0, 0.5, 0.25, 0.1)
STEPS += (0.01, 0.07, 0.001, 0.3, 1.5, 2.5, 1e-7, 1e-320, 1 / 3)
DRAFTS = (
    *("http://json-schema.org/draft-04/schema#", "http://json-schema.org/draft-07/schema#"),
    *("https://json-schema.org/draft/2019-09/schema", "https://json-schema.org/draft/2020-12/schema"),
)
TEXTS: dict[str, tuple[str, ...]] = {
    "date": ("2023-02-28", "2023-02-29", "2024-02-29", "1900-02-29", "2000-02-29", "0000-01-01", "0001-01-01"),
    "time": ("00:00:00Z", "23:59:60Z", "23:59:59.123456789+23:59", "24:00:00Z", "12:00:00", "12:00:00+24:00"),
    "date-time": ("2023-02-29T00:00:00Z", "2024-02-29t23:59:60z", "0000-01-01T00:00:00Z", "2016-12-31T23:59:60Z"),
    "duration": ("P1Y", "P1W", "PT36H", "P1Y2D", "P", "PT", "P1Y2M3DT4H5M6S", "P1M2W", "-P1D"),
    "email": ("a@b", "a@b.example", "@b", "a@[1.2.3.4]", "a@[256.1.1.1]", "a.@b", '"a b"@c'),
    "hostname": ("a", "a.b", "-a", "a-", "a..b", f"{'a' * 63}.b", "a" * 64, ".".join(["a" * 62] * 4), "a_b"),
    "ipv4": ("0.0.0.0", "255.255.255.255", "256.0.0.0", "01.2.3.4", "1.2.3", "1.2.3.4.5"),
    "ipv6": ("::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::2::3", "::1%eth0"),
    "uuid": ("00000000-0000-0000-0000-000000000000", "FFFFFFFF-ffff-FFFF-ffff-FFFFFFFFFFFF", "0" * 32, "urn:uuid:x"),
    "uri": ("http://a", "a:", "http://[::1]/", "http://a b", "http://[1:2:3:4:5:6:7:8:9]/", "//a", "a:b#c#d", "a:%zz"),
}
"""Texts at the edges of each format, right and wrong ones."""


class _Bytes:
    """A vocabulary of the 256 bytes and an end."""

    tokens = [bytes([value]) for value in range(_END)] + [b"<|end|>"]
    eos_token_id = _END
    bos_token_id = None
    special_token_ids = (_END,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


@dataclass(slots=True)
class Found:
    """What became of the schemas and of the texts that their grammars accept."""

    num_schemas: int = 0
    num_enforced: int = 0
    num_walked: int = 0
    num_probed: int = 0
    num_accepted: int = 0
    """Probes that a grammar accepts."""
    num_valid: int = 0
    """Probes that jsonschema accepts."""
    refusals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """Accepted texts that are not valid, and refusals without a reason."""

    def report(self) -> str:
        """Return the numbers as a table, with the reasons of refusals below."""
        rows = {
            "schemas": self.num_schemas,
            "enforced": self.num_enforced,
            "refused with a reason": self.refusals.total(),
            "whole texts of random walks": self.num_walked,
            "texts tried near the edges": self.num_probed,
            "of these valid": self.num_valid,
            "of these accepted by the grammar": self.num_accepted,
            "accepted texts that are not valid": len(self.failures),
        }
        lines = ["| what | number |", "|---|---|", *(f"| {name} | {number:,} |" for name, number in rows.items()), ""]
        lines += ["| refused because | schemas |", "|---|---|"]
        lines += [f"| {reason.replace('|', '/')} | {number:,} |" for reason, number in self.refusals.most_common()]
        return "\n".join([*lines, *(f"\nfailure: {one}" for one in self.failures[:_SHOWN_FAILURES])]) + "\n"


class SchemaMaker:
    """Makes random schemas, and texts that are valid by them or nearly so."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def document(self) -> dict[str, Any]:
        """Return a random schema."""
        schema = self._schema(0)
        if self._rng.random() < 0.15:
            schema = {"$defs": {"part": schema}, "$ref": "#/$defs/part"}
        if self._rng.random() < 0.3:
            schema = {"$schema": self._rng.choice(DRAFTS)} | schema
        return schema

    def text(self, schema: Any, root: Any) -> str:
        """Return a JSON text near what a schema allows, as the grammar would write it."""
        if not isinstance(schema, dict):
            return self._number(None)
        if "$ref" in schema:
            return self.text(root["$defs"]["part"], root)
        if "enum" in schema or "const" in schema:
            return self._near(self._rng.choice(schema["enum"]) if "enum" in schema else schema["const"])
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema:
                return self.text(self._rng.choice(schema[keyword]), root)
        kinds = schema.get("type", "number")
        kind = self._rng.choice(kinds) if isinstance(kinds, list) else kinds
        if kind == "object":
            properties, required = schema.get("properties", {}), schema.get("required", ())
            kept = [name for name in properties if name in required or self._rng.random() < 0.5]
            return "{" + ", ".join(f"{json.dumps(name)}: {self.text(properties[name], root)}" for name in kept) + "}"
        if kind == "array":
            low, high = schema.get("minItems", 0), schema.get("maxItems", 3)
            items = [self.text(schema.get("items", {}), root) for _ in range(self._rng.randint(low, max(low, high)))]
            return f"[{', '.join(items)}]"
        if kind == "string":
            return json.dumps(self._string(schema.get("format")), ensure_ascii=False)
        return "null" if kind == "null" else "true" if kind == "boolean" else self._number(schema)

    def _string(self, name: str | None) -> str:
        text = self._rng.choice(TEXTS[name]) if name in TEXTS else self._rng.choice(("", "a", "abc", "é", "1"))
        if text and self._rng.random() < 0.3:
            at = self._rng.randrange(len(text))
            text = text[:at] + self._rng.choice("0129abfTZ:.-+é@/%") + text[at + 1 :]
        return text

    def _number(self, schema: dict[str, Any] | None) -> str:
        names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        given = [schema[name] for name in names if name in schema] if schema else []
        numbers = [value for value in given if not isinstance(value, bool)]
        return self._near_number(self._rng.choice(numbers) if numbers else self._edge())

    def _near(self, value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(self._near, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(name)}: {self._near(one)}" for name, one in value.items()) + "}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return json.dumps(value)
        return self._near_number(value)

    def _near_number(self, value: float) -> str:
        """Return a number equal to a given one, or near it, in one of several spellings."""
        exact = decimal.Decimal(repr(value))
        if not exact.is_finite():
            exact = decimal.Decimal("1e400").copy_sign(exact)
        tiny, half = exact * decimal.Decimal("1e-17"), decimal.Decimal("0.5")
        steps = [*map(decimal.Decimal, (0, 0, 0, 1, -1, 2, -2, 512, -512, 1024)), half, tiny, -tiny]
        exact += self._rng.choice(steps)
        text = format(exact, "f")
        way = self._rng.random()
        if way < 0.15:
            return repr(float(exact)).replace("inf", "1e400")
        if way < 0.3 and "." not in text:
            return f"{text}.0"
        return text.rstrip("0").rstrip(".") if "." in text and way < 0.8 else text

    def _edge(self) -> float:
        value = self._rng.choice(EDGES)
        way = self._rng.random()
        if way < 0.2:
            return self._rng.choice((-1, 1)) * self._rng.getrandbits(self._rng.randint(1, 66))
        return value + self._rng.randint(-3, 3) if way < 0.3 else value

    def _value(self, depth: int) -> Any:
        way = self._rng.random()
        if depth < 2 and way < 0.1:
            return [self._value(depth + 1) for _ in range(self._rng.randint(0, 3))]
        if depth < 2 and way < 0.2:
            return {name: self._value(depth + 1) for name in "ab"[: self._rng.randint(0, 2)]}
        if way < 0.3:
            return self._rng.choice((None, True, False, "a", "1", "2023-02-29"))
        if way < 0.55:
            return self._rng.randint(-20, 20)
        if way < 0.7:
            return round(self._rng.uniform(-100, 100), self._rng.randint(0, 17))
        return self._edge()

    def _schema(self, depth: int) -> dict[str, Any]:
        makers: list[Callable[[int], dict[str, Any]]] = [self._range, self._range, self._range, self._text, self._text]
        makers += [self._listed, self._listed]
        if depth < _DEEPEST:
            makers += [self._object, self._array, self._combined, self._combined]
        return self._rng.choice(makers)(depth)

    def _range(self, depth: int) -> dict[str, Any]:
        rng, schema = self._rng, dict[str, Any]()
        kind = rng.choice(
            ("integer", "integer", "integer", "number", "number", None, ["integer", "null"], ["number", "string"])
        )
        if kind is not None:
            schema["type"] = kind
        low, high = self._edge(), self._edge()
        if rng.random() < 0.75 and low > high:
            low, high = high, low
        if rng.random() < 0.25:
            high = low + rng.choice((0, 1, 2, 10, 1000, 5000))
        for names, bound in ((("minimum", "exclusiveMinimum"), low), (("maximum", "exclusiveMaximum"), high)):
            if rng.random() < 0.7:
                schema[rng.choice(names)] = bound
        if rng.random() < 0.25:
            schema["multipleOf"] = rng.choice(STEPS)
        return schema

    def _text(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string", "format": self._rng.choice(sorted(ENFORCED_FORMATS))}
        way = self._rng.random()
        if way < 0.1:
            schema["minLength"] = self._rng.randint(0, 12)
        elif way < 0.2:
            schema["maxLength"] = self._rng.randint(0, 40)
        elif way < 0.3:
            schema["pattern"] = self._rng.choice(("^2", "[0-9]", "9", "a", "Z$", "^.{3,30}$"))
        elif way < 0.4:
            schema["enum"] = list(self._rng.sample(TEXTS[schema["format"]], 3))
        elif way < 0.45:
            del schema["type"]
        return schema

    def _listed(self, depth: int) -> dict[str, Any]:
        if self._rng.random() < 0.4:
            return {"const": self._value(0)}
        schema: dict[str, Any] = {"enum": [self._value(0) for _ in range(self._rng.randint(1, 4))]}
        if self._rng.random() < 0.3:
            schema["type"] = self._rng.choice(("integer", "number", "string", ["integer", "string"]))
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        properties = {name: self._schema(depth + 1) for name in "abc"[: self._rng.randint(1, 3)]}
        required = [name for name in properties if self._rng.random() < 0.6]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._rng.randint(0, 2)
        return {"type": "array", "items": self._schema(depth + 1), "minItems": low, "maxItems": low + 1}

    def _combined(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        keyword = rng.choice(("anyOf", "oneOf", "allOf", "allOf"))
        base = self._range(depth) if rng.random() < 0.4 else {}
        if keyword == "allOf":
            make = rng.choice((self._range, self._range, self._text))
            parts = [make(depth + 1) for _ in range(2)]
            if rng.random() < 0.3:
                parts.append({"enum": [self._value(1) for _ in range(3)]})
            return base | {"allOf": parts}
        return base | {keyword: [self._schema(depth + 1) for _ in range(2)]}


class Judge:
    """Whether texts are valid by a schema, by the package jsonschema with formats."""

    def __init__(self, text: str) -> None:
        from jsonschema import Draft202012Validator
        from jsonschema.validators import extend, validator_for

        plain, exact = json.loads(text), json.loads(text, parse_float=_decimal)
        kind = validator_for(plain, default=Draft202012Validator)
        # By doubles, 0.3 is no multiple of 0.1. The exact check decides that.
        lenient = extend(kind, {"multipleOf": lambda validator, step, instance, schema: ()})
        self._plain = lenient(plain, format_checker=kind.FORMAT_CHECKER)
        strict = extend(kind, {"multipleOf": _check_multiple})
        self._exact = strict(exact, format_checker=kind.FORMAT_CHECKER)

    def problem(self, text: str) -> str:
        """Return why a text is not valid; an empty string if it is."""
        with decimal.localcontext(prec=_DIGITS):
            try:
                problems = [*self._plain.iter_errors(json.loads(text))]
                problems += self._exact.iter_errors(json.loads(text, parse_float=_decimal))
            except ValueError as error:
                return f"no JSON: {error}"
        return problems[0].message if problems else ""


class Campaign:
    """Tries schemas one after another."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._maker = SchemaMaker(self._rng)
        self._compiler = compiler_of_bytes()
        self.found = Found()

    def run(self, count: int) -> Found:
        """Try some schemas and return what was found."""
        for _ in range(count):
            schema = self._maker.document()
            self.try_schema(json.dumps(schema).replace("Infinity", "1e400"), schema)
        return self.found

    def try_schema(self, text: str, schema: Any) -> None:
        """Try one schema, given as text and as a value."""
        found = self.found
        found.num_schemas += 1
        try:
            matcher = self._compiler.matcher("json", text)
        except ValueError as error:
            reason = reason_of("json", str(error))
            found.refusals[_QUOTED.sub("…", reason)[:110]] += 1
            if not reason:
                found.failures.append(f"refused without a reason: {text}")
            return
        found.num_enforced += 1
        judge = Judge(text)
        for answer in self._walks(matcher):
            found.num_walked += 1
            if problem := judge.problem(answer):
                found.failures.append(f"{text}\n  walked to {answer}: {problem}")
        for answer in {self._maker.text(schema, schema) for _ in range(NUM_PROBES)}:
            found.num_probed += 1
            problem = judge.problem(answer)
            found.num_valid += not problem
            if accepts(matcher, answer):
                found.num_accepted += 1
                if problem:
                    found.failures.append(f"{text}\n  accepted {answer}: {problem}")

    def _walks(self, whole: LLMatcher) -> Iterator[str]:
        for _ in range(NUM_WALKS):
            matcher, written = whole.deep_copy(), bytearray()
            while len(written) < MAX_CHARS:
                byte = self._next(matcher)
                if byte is None or byte == _END or not matcher.consume_token(byte):
                    break
                written.append(byte)
            if matcher.is_accepting():
                yield written.decode()

    def _next(self, matcher: LLMatcher) -> int | None:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [value for value in range(_END + 1) if mask >> value & 1]
        if not allowed:
            return None
        ends = [value for value in (_END, ord('"')) if value in allowed]
        common = [value for value in allowed if 32 <= value < 127]
        if ends and self._rng.random() < 0.15:
            return self._rng.choice(ends)
        return self._rng.choice(common if common and self._rng.random() < 0.95 else allowed)


def _decimal(text: str) -> decimal.Decimal:
    try:
        return decimal.Decimal(text)
    except decimal.InvalidOperation:  # The exponent is too large.
        return decimal.Decimal(float(text))


def _check_multiple(validator: Any, step: Any, instance: Any, schema: Any) -> Iterator[Exception]:
    """Check `multipleOf` by fractions; the package would divide by doubles, or round."""
    from jsonschema import ValidationError

    if not validator.is_type(instance, "number"):
        return
    size = decimal.Decimal(instance)
    is_huge = not size.is_finite() or abs(size.adjusted()) > _DIGITS
    if is_huge or (Fraction(size) / Fraction(decimal.Decimal(step))).denominator != 1:
        yield ValidationError(f"{instance!r} is not a multiple of {step}")


def compiler_of_bytes() -> Compiler:
    """Return a node's compiler of grammars over single bytes, so that any text can be tried."""
    return Compiler(LLTokenizer(TokenizerWrapper(_Bytes())))


def accepts(whole: LLMatcher, text: str) -> bool:
    """Whether a text as a whole matches a grammar."""
    matcher, content = whole.deep_copy(), list(text.encode())
    return matcher.try_consume_tokens(content) == len(content) and bool(matcher.is_accepting())


def main(arguments: Iterable[str] | None = None) -> int:
    """Try schemas, print the report, and return 1 if an invalid text was accepted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--write", type=Path, help="file for the report")
    options = parser.parse_args(None if arguments is None else list(arguments))
    began_s = time.monotonic()
    found = Campaign(options.seed).run(options.count)
    print(found.report())
    if options.write is not None:
        options.write.write_text(found.report())
    print(f"{time.monotonic() - began_s:.0f} s", file=sys.stderr)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
