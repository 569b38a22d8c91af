"""What a cache format costs in quality: teacher forcing through the cache, beside the exact model.

A text is tokenised once, without special tokens, and cut into consecutive windows. A window begins
with an empty cache; every token but its first is scored, predicted from the tokens before it as
`decode` would have seen them: packed where a page is sealed, exact elsewhere. A window can begin
with a prompt, whose tokens see one another exactly, as in a chat; then what follows it is scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import CodecError, UsageError
from .progress import Progress, silent

if TYPE_CHECKING:
    from .generate import Model
    from .kvstore import KVSpec
    from .stores import Store

LOGIT_ROWS = 128
"""Logits are made for so many tokens at a time: 24 MiB with a vocabulary of 49,152 tokens."""

_Told = Callable[[float], None]
"""Told what share of a window is done."""

_SCORED_ROWS = 16
"""Of these, a thread scores so many; on a GPU's machine this would take longer than the model."""


@dataclass(frozen=True)
class Quality:
    """A format over all scored tokens; logarithms are natural.

    `nll` is the mean negative log-likelihood, `ppl` its exponential. Beside the exact model (f32
    cache, nothing packed): `kld` is the mean Kullback-Leibler divergence from its distribution,
    `top1` the per cent of tokens with the same likeliest successor, `dnll` the rise of the nll.
    `nll_se`, `dnll_se` and `kld_se` are standard errors over windows, None for a single one.
    """

    kv: str
    ppl: float
    nll: float
    kld: float
    tokens: int
    bits_per_element: float
    seconds: float
    top1: float
    dnll: float
    nll_se: float | None
    dnll_se: float | None
    kld_se: float | None


def cut_windows(
    documents: Sequence[Sequence[int]], context: int, max_tokens: int | None = None
) -> np.ndarray:
    """Consecutive windows of token ids, (windows, context) i64, each inside one document.

    The last partial window of a document is dropped; so are windows that do not fit `max_tokens`
    tokens in all. Raises UsageError where nothing is left.
    """
    if context < 2:
        raise UsageError(f"a context must be at least 2 tokens to score one, got {context}")
    if max_tokens is not None and max_tokens < context:
        raise UsageError(
            f"at most {max_tokens:,} tokens are less than one window of {context:,} tokens"
        )
    whole = [np.asarray(ids[: len(ids) // context * context], np.int64) for ids in documents]
    windows = np.concatenate([np.empty(0, np.int64), *whole]).reshape(-1, context)
    if not len(windows):
        longest = max((len(ids) for ids in documents), default=0)
        raise UsageError(
            f"the text has {longest:,} tokens, less than one window of {context:,} tokens"
        )
    return windows if max_tokens is None else windows[: max_tokens // context]


def measure_quality(
    model: Model,
    specs: Sequence[KVSpec],
    windows: np.ndarray,
    progress: Progress = silent,
    *,
    prompt: int | None = None,
) -> tuple[Quality, list[Quality]]:
    """The exact model, and each format, on windows (count, context) of token ids.

    With a `prompt` the first so many tokens of a window go into the cache as a prompt does (a
    format that packs at a prompt's end does it there), and the context - prompt tokens after them
    are scored. `progress` counts tokens, those of every format and of the exact model. Raises
    UsageError for a prompt that leaves no token to score, CodecError for a format whose logits are
    not finite.
    """
    from .backends.cpu import available_threads

    if prompt is not None and not 1 <= prompt < windows.shape[1]:
        raise UsageError(
            f"a prompt must be 1 to {windows.shape[1] - 1:,} tokens in windows of "
            f"{windows.shape[1]:,}, got {prompt:,}"
        )
    first = 1 if prompt is None else prompt  # of a window, the first token that is scored
    for spec in specs:
        model.new_store(spec)  # refuses what the model cannot have, before any work
    passes = [_Pass("exact", None), *(_Pass(str(spec), spec) for spec in specs)]
    context, total = windows.shape[1], len(passes) * windows.size
    done = 0

    def told(share: float) -> None:
        progress("measure", done + int(context * share), total)

    # The threads of a GPU's model are not those of this machine.
    threads = model.ops.threads if model.ops.name == "cpu" else available_threads()
    with ThreadPoolExecutor(threads) as pool:
        for window in windows:
            hidden = []
            for run in passes:
                # (context - first, hidden_size)
                hidden.append(run.hidden(model, window[:-1], first, prompt is not None, told))
                done += context
            _score(model, passes, hidden, window[first:], pool)
    exact = passes[0].quality(passes[0])
    return exact, [run.quality(passes[0]) for run in passes[1:]]


def _score(
    model: Model, passes: Sequence[_Pass], hidden: Sequence[Any], targets: Any, pool: Executor
) -> None:
    """Add the scores of one window; hidden rows (n, hidden_size) of each pass, targets (n,)."""
    sums = np.zeros((len(passes), 3))  # nll, kld, top-1 hits
    for start in range(0, len(targets), LOGIT_ROWS):
        rows = slice(start, start + LOGIT_ROWS)
        wanted = _parts(targets[rows])
        exact: list[Predictions] = []
        for run, states, out in zip(passes, hidden, sums):
            started = perf_counter()
            found = list(pool.map(Predictions, _parts(model.decoder.logits(states[rows]))))
            exact = exact or found
            out += sum(pool.map(Predictions.scores, found, wanted, exact))
            run.seconds += perf_counter() - started
    for run, out in zip(passes, sums):
        if not np.isfinite(out).all():
            what = "the exact model" if run.spec is None else f"cache format {run.name}"
            raise CodecError(f"{what} gives logits that are not finite")
        run.windows.append(out / len(targets))
        run.tokens += len(targets)


def _parts(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[i : i + _SCORED_ROWS] for i in range(0, len(rows), _SCORED_ROWS)]


class _Pass:
    """One format's way through all windows; without a spec the exact model's."""

    def __init__(self, name: str, spec: KVSpec | None):
        self.name = name
        self.spec = spec
        self.bits_per_element = 32.0
        self.seconds = 0.0
        self.tokens = 0
        self.windows: list[np.ndarray] = []  # of each window (3,): nll, kld, top-1 share

    def hidden(self, model: Model, ids: np.ndarray, first: int, prompted: bool, told: _Told) -> Any:
        """Rows (n, hidden_size) f32 that become logits, those of tokens first - 1, first, ...

        `prompted`: the tokens before `first` are a prompt.
        """
        started = perf_counter()
        if self.spec is None:
            rows = model.decoder.trace(ids, progress=_part(told, 0, 1))[first - 1 :]
        else:
            store = model.new_store(self.spec)
            fill = _after_prompt if prompted else _whole
            rows = fill(model, store, ids, first, told)
            self.bits_per_element = store.stats().bits_per_element
        self.seconds += perf_counter() - started
        return rows

    def quality(self, exact: _Pass) -> Quality:
        nlls = np.array([nll for nll, _, _ in self.windows])  # (windows,)
        rises = nlls - [nll for nll, _, _ in exact.windows]  # (windows,)
        nll, kld, top1 = np.mean(self.windows, axis=0)
        return Quality(
            kv=self.name,
            ppl=math.exp(nll),
            nll=float(nll),
            kld=max(float(kld), 0.0),  # rounding can leave -1e-9
            tokens=self.tokens,
            bits_per_element=self.bits_per_element,
            seconds=self.seconds,
            top1=100 * float(top1),
            dnll=float(rises.mean()),
            nll_se=_standard_error(nlls),
            dnll_se=_standard_error(rises),
            kld_se=_standard_error(np.array([kld for _, kld, _ in self.windows])),
        )


def _whole(model: Model, store: Store, ids: np.ndarray, first: int, told: _Told) -> Any:
    return model.decoder.hidden(ids, store, history="packed", progress=_part(told, 0, 1))


def _after_prompt(model: Model, store: Store, ids: np.ndarray, first: int, told: _Told) -> Any:
    """Rows (len(ids) - first + 1, hidden_size) f32: of a prompt's last token, and of the rest."""
    decoder, share = model.decoder, first / len(ids)
    rows = model.ops.empty((len(ids) - first + 1, model.config.hidden_size))
    seen = _part(told, 0, share)
    rows[:1] = decoder.hidden(ids[:first], store, history="exact", progress=seen)[-1:]
    if first < len(ids):
        seen = _part(told, share, 1)
        rows[1:] = decoder.hidden(ids[first:], store, history="packed", progress=seen)
    return rows


def _part(told: _Told, start: float, end: float) -> Callable[[int, int], None]:
    """The progress of a pass, in layers, as that of a part of a window."""
    return lambda layer, layers: told(start + (end - start) * layer / layers)


def _standard_error(means: np.ndarray) -> float | None:
    if len(means) < 2:
        return None
    return float(means.std(ddof=1)) / math.sqrt(len(means))


class Predictions:
    """What a model says of the next token, from logits (n, vocab_size) f32; sums are f64."""

    def __init__(self, logits: np.ndarray):
        self.logits = logits
        peak = logits.max(axis=1, keepdims=True)  # (n, 1) f32
        with np.errstate(all="ignore"):  # what is not finite is refused by the caller
            total = np.exp(logits - peak).sum(axis=1, dtype=np.float64)  # (n,)
        self._log_total = peak[:, 0] + np.log(total)  # (n,) f64

    @cached_property
    def likeliest(self) -> np.ndarray:
        """The likeliest tokens, (n,) i64."""
        return self.logits.argmax(axis=1)

    @cached_property
    def _probabilities(self) -> np.ndarray:
        return np.exp(self.logits - self._log_total[:, None].astype(np.float32))  # (n, vocab) f32

    def scores(self, targets: np.ndarray, exact: Predictions) -> np.ndarray:
        """Sums (3,) f64 over the tokens that came, (n,) i64: nll, divergence, top-1 hits."""
        hits = (self.likeliest == exact.likeliest).sum()
        return np.array([self.nll(targets).sum(), self.divergence(exact).sum(), hits])

    def nll(self, targets: np.ndarray) -> np.ndarray:
        """Negative log-likelihoods (n,) f64 of the tokens that came, (n,) i64."""
        return self._log_total - self.logits[np.arange(len(targets)), targets]

    def divergence(self, exact: Predictions) -> np.ndarray:
        """Kullback-Leibler divergences (n,) f64 of these predictions from the exact ones."""
        with np.errstate(all="ignore"):
            change = exact._probabilities * (exact.logits - self.logits)  # (n, vocab_size) f32
        return change.sum(axis=1, dtype=np.float64) - (exact._log_total - self._log_total)
