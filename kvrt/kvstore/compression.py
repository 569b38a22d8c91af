"""What is kept of a prompt: formats that choose tokens and widths once it has been read.

    POLICY:BUDGET[:OPTION]...     such as rdkv:1024, adakv:2.5%, rdkv:256:shared, rdkv:paper:512

A policy scores, an allocator spends the budget (package `kvrt.trizone`); here is the written form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, cast

from ..errors import UnsupportedError, UsageError
from .grammar import MAX_TOKENS, did_you_mean, quoted

if TYPE_CHECKING:
    from .layout import Geometry

POLICIES = ("rdkv", "snapkv", "adakv", "h2o")
PolicyName = Literal["rdkv", "snapkv", "adakv", "h2o"]

SINK, WINDOW = 4, 32
"""Protected tokens where the format does not say otherwise."""

EXACT_BYTES = 4
"""Of one channel of a token kept exactly: a key and a value in 16 bits."""

MAX_DIM = 256
"""Channels of a head are counted in a byte."""

_OPTIONS = ("paper", "shared")
_BUDGET = re.compile(r"([0-9]{1,20})|([0-9]{1,3}(?:\.[0-9]{1,6})?)%")


@dataclass(frozen=True)
class Compression:
    """How a prompt is compressed.

    `policy`: what scores tokens and channels; `budget`: what is kept, for each layer and KV head,
    in tokens of 16-bit keys and values (an int), or as a share of the prompt (a Fraction up to 1).
    `paper`: rdkv with the distortion of its paper in place of the measured one; `shared`: one
    budget for all heads of a layer; `recompress`: once so many tokens are exact, the oldest 64 that
    are not protected are packed too.
    """

    policy: PolicyName
    budget: int | Fraction
    paper: bool = False
    shared: bool = False
    recompress: int | None = None

    def __post_init__(self) -> None:
        if self.paper and self.policy != "rdkv":
            raise UnsupportedError(f"cache format {self}: paper is a form of rdkv, not of others")
        if self.shared and self.policy == "adakv":
            raise UnsupportedError(
                f"cache format {self}: adakv divides a layer's budget among its heads by itself; "
                "shared is for the others"
            )

    @property
    def name(self) -> str:
        """That of the policy, as `kvrt.trizone.policies` has it."""
        return f"{self.policy}{':paper' * self.paper}"

    @classmethod
    def parse(cls, text: str) -> Compression:
        """Read POLICY:BUDGET[:OPTION]... Raises UsageError, UnsupportedError."""
        where = f"cache format {quoted(text)}"
        policy, *parts = (part.strip() for part in text.split(":"))
        budgets = [part for part in parts if _BUDGET.fullmatch(part)]
        options = [part for part in parts if part not in budgets]
        for option in options:
            if option not in _OPTIONS:
                raise UsageError(
                    f"{where}: {quoted(option, 24)} is neither a budget nor an option"
                    f"{did_you_mean(option, _OPTIONS)} (a budget is tokens, such as {policy}:1024, "
                    f"or a share, such as {policy}:2.5%; options are {' and '.join(_OPTIONS)})"
                )
            if options.count(option) > 1:
                raise UsageError(f"{where}: {option} is given twice")
        if len(budgets) != 1:
            raise UsageError(
                f"{where}: expected one budget, in tokens ({policy}:1024) or as a share of the "
                f"prompt ({policy}:2.5%), got {len(budgets)}"
            )
        budget = _budget(budgets[0], where)
        return cls(cast(PolicyName, policy), budget, "paper" in options, "shared" in options)

    def __str__(self) -> str:
        budget = self.budget
        size = f"{budget}"
        if not isinstance(budget, int):
            size = f"{float(budget * 100):.6f}".rstrip("0").rstrip(".") + "%"
        return f"{self.name}:{size}{':shared' * self.shared}"

    def check(self, geometry: Geometry) -> None:
        """Raise UnsupportedError for a model whose prompts cannot be compressed."""
        if geometry.windows:
            raise UnsupportedError(
                f"cache format {self}: this model has layers with a sliding window, which forget "
                "tokens by themselves; f16, kvrt4 and other formats of pages work"
            )
        if geometry.head_dim % 16 or geometry.head_dim > MAX_DIM:
            raise UnsupportedError(
                f"cache format {self}: head_dim must be a multiple of 16 up to {MAX_DIM}, this "
                f"cache has {geometry.head_dim}; f16 works"
            )

    def budget_bytes(self, tokens: int, head_dim: int) -> int:
        """Bytes for a KV head of a layer, of a prompt of so many tokens; all of it at most."""
        most = EXACT_BYTES * head_dim * tokens
        if isinstance(self.budget, int):
            return min(most, EXACT_BYTES * head_dim * self.budget)
        return int(most * self.budget)


def is_compression(text: str) -> bool:
    """Whether a format's name is that of a policy, whatever comes behind it."""
    return text.partition(":")[0].strip() in POLICIES


def _budget(text: str, where: str) -> int | Fraction:
    if not text.endswith("%"):
        if int(text) > MAX_TOKENS:
            raise UsageError(f"{where}: a budget is at most {MAX_TOKENS} tokens, got {text[:24]}")
        return int(text)
    share = Fraction(text[:-1]) / 100
    if share > 1:
        raise UsageError(f"{where}: a budget is at most 100% of the prompt, got {text}")
    return share
