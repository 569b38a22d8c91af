"""A jinja2 environment whose templates always end: every step and every byte made is paid for.

A chat template is a program that comes with a model's files. jinja2's sandbox keeps it away from
Python's internals, but not from running for hours or filling memory. Here a `Meter` holds a budget
of work, and everything a template can repeat or grow goes through it:

- iteration: the code generator wraps every `for`; lazy filters draw from the same wrapper;
- calls (functions, macros, methods, recursive loops), all binary operators, filters, tests;
- made text and collections: operators, `~`, literals, slices, captured blocks, filters, methods
  and the output itself, each charged by size before it is made where it can grow.

The budget is a number, so the verdict does not depend on the machine or the thread; a limit on CPU
time stands behind it. Filters and methods that chat templates do not need are left out rather than
charged. Nothing here uses signals, threads or tracing.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.ext import LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .template_meter import (
    CONCAT,
    ELEMENT,
    LITERAL,
    MADE,
    STEP,
    STEPS,
    GenerationTag,
    Meter,
    MeteredCode,
    TemplateRefusal,
)

MAX_RANGE = 100_000
MAX_INTEGER_BITS = 4096

_TEXT_METHODS = """
    capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit
    islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix
    removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith
    strip swapcase title upper
"""
_METHODS = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values")),
    list: frozenset(("count", "index")),
    tuple: frozenset(("count", "index")),
    LoopContext: frozenset(("changed", "cycle")),
}
# Cost is that of their output; the value is a collection or a number.
_PLAIN_FILTERS = ("abs", "attr", "count", "d", "default", "first", "items", "last", "length",
                  "reverse")  # fmt: skip
# The value is drawn element by element.
_LAZY_FILTERS = ("map", "reject", "rejectattr", "select", "selectattr")
# The value is read to its depth: compared, or turned into text.
_DEEP_FILTERS = ("capitalize", "dictsort", "lower", "max", "min", "round", "sort", "title", "trim",
                 "truncate", "unique", "upper")  # fmt: skip


_COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")  # what compiled calls carry besides


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one chat template. Set `meter` before each compilation or rendering."""

    code_generator_class = MeteredCode
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[LoopControlExtension, GenerationTag],
            finalize=self._printable,
            cache_size=0,
        )
        self.meter = Meter()
        theirs = self.filters
        self.filters = {
            STEPS: self._steps,
            CONCAT: self._concat,
            LITERAL: self._literal,
            MADE: self._made,
            "e": self._escape,
            "escape": self._escape,
            "format": lambda value, *args: self.call_binop(None, "%", self._text(value), args),
            "float": functools.partial(self._number, theirs["float"]),
            "indent": self._indent,
            "int": functools.partial(self._number, theirs["int"]),
            "join": self._join,
            "list": lambda value: list(self._steps(value)),
            "replace": self._replace,
            "safe": lambda value: value,  # nothing is escaped unasked
            "string": self._text,
            "tojson": self._tojson,
        }
        for names, before in (
            (_PLAIN_FILTERS, lambda value: value),
            (_LAZY_FILTERS, self._steps),
            (_DEEP_FILTERS, self._whole),
        ):
            self.filters |= {name: self._metered(theirs[name], before) for name in names}
        tests: dict[str, Any] = dict(self.tests)
        self.tests = {name: self._metered(test) for name, test in tests.items()}
        self.globals = {
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": self._raise_exception,
            "range": self._range,
            "strftime_now": self._strftime_now,
        }

    # -- What jinja2 calls

    def concat(self, parts: Iterable[str]) -> str:
        made = []
        for part in parts:
            self.meter.spend(len(part))
            made.append(part)
        return "".join(made)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.meter.spend(STEP)
        owner = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)
        if isinstance(obj, LoopContext):  # the recursive form: loop(children)
            args = (self._steps(args[0]), *args[1:]) if args else args
        elif obj is dict or obj is self.globals["namespace"]:
            for key, value in (*enumerate(args), *kwargs.items()):
                self._weigh(None if key in _COMPILER_ARGUMENTS else value)
        elif owner is not None and owner is not self:
            return self._made(self._call_method(context, owner, obj, args, kwargs))
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend = self.meter.spend
        spend(STEP)
        if operator == "+" and _sized(left) and _sized(right):
            spend(_size(left) + _size(right))
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if _sized(one) and isinstance(other, int):
                    spend(max(0, _size(one) * other))
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * max(0, right))
        elif operator == "%" and isinstance(left, str):
            if re.search(r"%(\([^)]*\))?[^a-zA-Z%(]*(\*|\d{4})", left):
                raise SecurityError("a text format with a width is not available")
            spend(len(left) + left.count("%") * self._weigh(right, printable=True))
        return super().call_binop(context, operator, left, right)

    # -- Measuring

    def _made(self, value: Any) -> Any:
        self.meter.spend(STEP + _size(value))
        return value

    def _steps(self, value: Any) -> Iterator[Any]:
        spend = self.meter.spend
        for item in value:
            spend(STEP)
            yield item

    def _weigh(self, value: Any, printable: bool = False) -> int:
        """Charge a value by all that it reaches, counting a shared part each time it is reached."""
        total = 0
        stack = [value]
        while stack:
            item = stack.pop()
            units = ELEMENT
            if isinstance(item, str):
                units += len(item)
            elif isinstance(item, Mapping):
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, (list, tuple)):
                stack.extend(item)
            elif printable and not isinstance(item, (int, float, Undefined, type(None))):
                raise SecurityError(f"a {type(item).__name__} cannot be turned into text")
            self.meter.spend(units)
            total += units
        return total

    def _whole(self, value: Any) -> Any:
        if not isinstance(value, (str, Mapping, list, tuple, int, float, Undefined, type(None))):
            value = list(self._steps(value))
        self._weigh(value)
        return value

    def _metered(
        self, function: Callable[..., Any], before: Callable[[Any], Any] = lambda value: value
    ) -> Callable[..., Any]:
        # Some take the environment or the context before the value.
        lead = int(getattr(function, "jinja_pass_arg", None) is not None)

        @functools.wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            self.meter.spend(STEP)
            args = (*args[:lead], before(args[lead]), *args[lead + 1 :])
            for limit in (*args[lead + 1 :], *kwargs.values()):
                if isinstance(limit, int) and abs(limit) > MAX_RANGE:
                    raise SecurityError(f"{limit:.6g} is too large for a filter's argument")
            return self._made(function(*args, **kwargs))

        return metered

    # -- Making text

    def _printable(self, value: Any) -> Any:
        if not isinstance(value, str):
            self._weigh(value, printable=True)
        return value

    def _text(self, value: Any) -> str:
        self.meter.spend(STEP)
        return value if isinstance(value, str) else str(self._printable(value))

    def _literal(self, value: Any) -> Any:
        self._weigh(value)
        return value

    def _concat(self, parts: tuple[Any, ...]) -> str:
        return self.concat(self._text(part) for part in parts)

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            pick = make_attrgetter(self, attribute)
            value = [pick(item) for item in self._steps(value)]
        parts = [self._text(item) for item in self._steps(value)]
        separator = self._text(d)
        self.meter.spend(sum(map(len, parts)) + len(separator) * len(parts))
        return separator.join(parts)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = self._text(value), self._text(old), self._text(new)
        self.meter.spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _indent(
        self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False
    ) -> str:
        pad = width if isinstance(width, str) else " " * min(width, 1000)
        lines = (self._text(value) + "\n").splitlines()  # keeps a last empty line
        self.meter.spend(sum(map(len, lines)) + len(lines) * (len(pad) + ELEMENT))
        padded = [pad + line if line or blank else line for line in lines[1:]]
        return "\n".join(((pad if first else "") + lines[0], *padded))

    def _escape(self, value: Any) -> str:
        text = self._text(value)
        for plain, escaped in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&#34;"),
                               ("'", "&#39;")):  # fmt: skip
            text = self._replace(text, plain, escaped)
        return text

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON, as model makers expect: characters such as < and ' stay as they are."""
        if indent is not None and not 0 <= indent <= 16:
            raise SecurityError(f"tojson indents by 0 to 16 spaces, got {indent}")
        if any(len(part) > 16 for part in separators or ()):
            raise SecurityError("tojson takes separators of 16 characters at most")
        weight = self._weigh(value, printable=True) * (12 if ensure_ascii else 1)
        # An element sits at most as deep as the value is nested; the encoder stops far below 1000.
        self.meter.spend(weight * (1 + (indent or 0) * min(_depth(value), 1000) // ELEMENT))
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    # -- Functions and methods

    def _number(self, convert: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        self.meter.spend(STEP)
        if isinstance(value, str) and len(value) > 1000:
            raise SecurityError("a number of more than 1000 characters")
        return convert(value, *args, **kwargs)

    def _range(self, *args: int) -> range:
        made = range(*args)
        if len(made) > MAX_RANGE:
            raise SecurityError(f"range() makes at most {MAX_RANGE} numbers, got {len(made)}")
        return made

    @staticmethod
    def _raise_exception(message: object) -> None:
        raise TemplateRefusal(str(message))

    @staticmethod
    def _strftime_now(format: str) -> str:
        return datetime.now().strftime(format[:256])

    def _call_method(self, context: Any, owner: Any, method: Any, args: Any, kwargs: Any) -> Any:
        name = method.__name__
        kind = next((kind for kind in _METHODS if isinstance(owner, kind)), None)
        if kind is None or name not in _METHODS[kind]:
            raise SecurityError(f"{type(owner).__name__}.{name}() is not available")
        if isinstance(owner, str):
            # split() makes a list of up to half as many texts as there are characters.
            self.meter.spend(len(owner) * (4 if "split" in name else 1))
            if name == "replace":
                return self._replace(owner, *args)
            if name == "join":
                return self._join(args[0] if args else (), owner)
            if name == "format":
                if re.search(r"\{[^{}]*:", owner):
                    raise SecurityError("a text format with a width is not available")
                named = [value for key, value in kwargs.items() if key not in _COMPILER_ARGUMENTS]
                self.meter.spend(owner.count("{") * self._weigh([*args, *named], printable=True))
        return super().call(context, method, *args, **kwargs)


def _sized(value: object) -> bool:
    return isinstance(value, (str, list, tuple))


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return ELEMENT * len(value) if isinstance(value, (list, tuple, dict)) else 0


def _depth(value: object) -> int:
    """Levels of nesting. Call `_weigh` first: it ends where a value holds itself."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, (Mapping, list, tuple))
            for child in (item.values() if isinstance(item, Mapping) else item)
        ]
    return depth


def _check_bits(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise SecurityError(f"a number of about {bits} bits; at most {MAX_INTEGER_BITS}")
