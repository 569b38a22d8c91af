"""The budget of a chat template's work, and the code generator that makes templates pay for it."""

from __future__ import annotations

import time
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

BASE_WORK = 20_000_000  # units: a character made is 1, an element of a collection 16, a step 20
WORK_PER_INPUT_CHARACTER = 64
STEP, ELEMENT = 20, 16
MAX_SECONDS = 1.0  # CPU seconds of the rendering thread
# Filters that the generated code calls; no template can spell these names.
STEPS, CONCAT, LITERAL, MADE = "kvrt steps", "kvrt concat", "kvrt literal", "kvrt made"


class TemplateRefusal(TemplateRuntimeError):
    """The template itself called `raise_exception`."""


class Meter:
    """The budget of one rendering; `spend` raises TemplateRuntimeError when it is used up."""

    def __init__(self, input_characters: int = 0) -> None:
        self._left = BASE_WORK + WORK_PER_INPUT_CHARACTER * input_characters
        self._wall_end = time.perf_counter() + MAX_SECONDS
        self._cpu_end = time.thread_time() + MAX_SECONDS

    def spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise TemplateRuntimeError("it does more work than rendering a conversation can need")
        # The wall clock is the cheap one to read; CPU time alone decides, so that a busy machine
        # or a suspended process never fails an honest template.
        if time.perf_counter() > self._wall_end and time.thread_time() > self._cpu_end:
            raise TemplateRuntimeError(f"it runs longer than {MAX_SECONDS:g} s")


class _MeterNodes(NodeTransformer):
    """Puts the nodes that the sandbox cannot intercept behind filters of the environment."""

    def _behind(self, name: str, node: Any) -> nodes.Filter:
        place = {"lineno": node.lineno, "environment": node.environment}
        return nodes.Filter(node, name, [], [], None, None, **place)

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._behind(STEPS, node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        place = {"lineno": node.lineno, "environment": node.environment}
        parts = nodes.Tuple(node.nodes, "load", **place)
        return self._behind(CONCAT, parts)

    def visit_List(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return self._behind(LITERAL, node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        self.generic_visit(node)
        return self._behind(LITERAL, node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return self._behind(MADE, node) if isinstance(node.arg, nodes.Slice) else node


class MeteredCode(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        super().visit_Template(_MeterNodes().visit(node), frame)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training masks; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (the type is jinja2's)

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body
