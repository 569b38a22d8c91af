"""What a `kvrt bench` is to measure: its options, read and checked before anything is loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..bench.axes import bytes_word
from ..errors import ModelNotFoundError, UnsupportedError, UsageError
from .console import note, user_path
from .kv_options import DEFAULT_FORMATS, Format, fitting_formats, resolve_formats
from .options import default_model
from .ranges import parse_bytes, parse_counts, parse_scan
from .report import OUTPUTS

if TYPE_CHECKING:
    from ..bench.case import Case, Fill, Settings
    from ..bench.measure import Job
    from ..shapes import Shape

PROMPT, GENERATED, REPETITIONS, SCAN_STEPS = 512, 128, 5, 16
TERMINAL = "-"
DEFAULT_SHAPE = "synthetic:smollm2-135m"


@dataclass(frozen=True)
class Plan:
    """What is to be measured; everything in it was checked."""

    model: str
    shape: Shape
    formats: Sequence[Format]
    cases: Sequence[Case]
    scan: bool
    settings: Settings
    batches: Sequence[int | None]
    micro_batches: Sequence[int | None]
    threads: Sequence[int | None]
    device: str
    calibration: str | None
    memory: int  # bytes for weights and cache; 0: unknown
    limit: int | None  # bytes that --limit grants
    check: bool
    sequences: int
    plot: Path | None
    draw: bool  # on the terminal

    @property
    def names(self) -> list[str]:
        return [chosen.name for chosen in self.formats]

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max(case.context for case in self.cases)

    @property
    def varied(self) -> list[str]:
        """Fields whose values differ between rows."""
        lists = {
            "threads": self.threads,
            "n_batch": self.batches,
            "n_ubatch": self.micro_batches,
        }
        return [field for field, values in lists.items() if len(values) > 1]

    def fits(self, chosen: Format) -> int | None:
        """Tokens whose cache fits beside the weights, and whose prompt, if it is compressed."""
        from ..bench.budget import context_bytes
        from ..bench.fit import longest_context

        if not self.memory:
            return None
        shape, sequences = self.shape, self.sequences
        room = self.memory - shape.weight_bytes
        return longest_context(lambda n: context_bytes(shape, chosen.spec, n, sequences), room)


def bench_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of llama-bench, and those that it lacks."""
    counts = "A list or ranges: 512, 0,4096, 0-8k+1k, 512-8k*2."
    for option in (
        click.option("-m", "--model", metavar="MODEL", help="A model folder, the name of a pulled "
                     "model, or synthetic:NAME: a published shape with random weights.  "
                     "[default: smollm2]"),
        click.option("-p", "--n-prompt", "prompts", multiple=True, metavar="N,...",
                     help=f"Tokens of a prompt. {counts}  [default: {PROMPT}]"),
        click.option("-n", "--n-gen", "generated", multiple=True, metavar="N,...",
                     help=f"Tokens to generate; with --scan those of one repetition, whose last "
                     f"fills the context.  [default: {GENERATED}; with --scan {SCAN_STEPS}]"),
        click.option("-pg", "pairs", multiple=True, metavar="P,N",
                     help="A prompt of P tokens, then N generated ones, timed together."),
        click.option("-d", "--n-depth", "depths", multiple=True, metavar="N,...",
                     help="Tokens cached before the test.  [default: 0]"),
        click.option("--scan", metavar="A:B", help="Cache and decode time at each context: from A, "
                     "doubling, to B, or a list or ranges; in place of -p, -pg and -d."),
        click.option("-r", "--repetitions", type=click.IntRange(1, 1000), default=REPETITIONS,
                     show_default=True, metavar="N", help="How often each test is timed."),
        click.option("--fill", type=click.Choice(("prefill", "synthetic")),
                     help="What is cached before: a prefill of random token ids, or random keys "
                     "and values through the real encoder.  [default: prefill, with --scan "
                     "synthetic]"),
        click.option("-b", "--batch-size", "batches", multiple=True, metavar="N,...",
                     help="Tokens of a prompt that go through all layers at a time.  "
                     "[default: the whole prompt]"),
        click.option("-ub", "--ubatch-size", "micro_batches", multiple=True, metavar="N,...",
                     help="Tokens that the MLP takes at a time.  [default: 256, on a GPU 2048]"),
        click.option("-t", "--threads", multiple=True, metavar="N,...",
                     help="Threads of the CPU to compute with.  [default: all cores]"),
        click.option("--no-warmup", is_flag=True, help="Time the first run too."),
        click.option("--check", is_flag=True, help="Compare each format's next tokens with f16's."),
        click.option("--dry-run", is_flag=True,
                     help="Only the arithmetic of memory: nothing is loaded or run."),
        click.option("--batch", "sequences", type=click.IntRange(1, 1 << 20), metavar="B",
                     help="With --dry-run: so many sequences at once."),
        click.option("--limit", metavar="BYTES", help="Memory for weights and cache, such as 48GB "
                     "or 48GiB; a GPU's allocator keeps to it.  [default: what the device has "
                     "free; with --dry-run none]"),
        click.option("--plot", metavar="FILE", help="With --scan: draw it into a .png or .svg file "
                     "(extra `plot`), or with - on the terminal."),
        click.option("-oe", "--output-err", "output_err", type=click.Choice(OUTPUTS),
                     help="Print the rows on stderr too, in this form."),
    )[::-1]:  # fmt: skip
        function = option(function)
    return function


# What the options ask for


def make_plan(
    *,
    model: str | None,
    kv: tuple[str, ...],
    kv_k: str | None,
    kv_v: str | None,
    calibration: str | None,
    prompts: tuple[str, ...],
    generated: tuple[str, ...],
    pairs: tuple[str, ...],
    depths: tuple[str, ...],
    scan: str | None,
    repetitions: int,
    fill: str | None,
    batches: tuple[str, ...],
    micro_batches: tuple[str, ...],
    threads: tuple[str, ...],
    no_warmup: bool,
    check: bool,
    dry_run: bool,
    sequences: int | None,
    limit: str | None,
    plot: str | None,
    device: str,
    verbose: bool,
) -> Plan:
    """The plan, after refusing all that cannot be: nothing was loaded so far."""
    from ..backends import available_memory
    from ..bench.case import Settings
    from ..source import find_shape

    if scan is None:
        if plot is not None:
            raise UsageError("--plot draws a scan: it needs --scan A:B")
        tests = _tests(prompts, generated, pairs, depths)
    else:
        for words, given in (("-p", prompts), ("-pg", pairs), ("-d", depths)):
            if given:
                raise UsageError(f"{words} and --scan exclude each other: a scan decodes only")
        tests = _scan(scan, generated)
    if dry_run and (check or plot is not None):
        raise UsageError(f"{'--check' if check else '--plot'}: --dry-run runs nothing to show")
    if sequences is not None and not dry_run:
        raise UsageError("--batch is for --dry-run: kvrt computes one sequence at a time")
    formats = resolve_formats(kv, kv_k, kv_v, DEFAULT_FORMATS)
    room = None if limit is None else parse_bytes(limit, "--limit")
    counts = [
        _counts(texts, option, [None], low=1)
        for texts, option in ((batches, "-b"), (micro_batches, "-ub"), (threads, "-t"))
    ]
    if calibration is not None and not any(one.spec.calibrated for one in formats):
        note("kvrt: --calibration is not used: none of these formats needs one")
    drawing = None if dry_run else _plot(plot)
    name = _default(dry_run) if model is None else model
    shape = find_shape(name)
    chosen = bool(kv or kv_k or kv_v)
    fitting = fitting_formats(formats, shape.geometry, shape.context_limit, chosen)
    way: Fill = "synthetic" if fill == "synthetic" or (fill is None and scan) else "prefill"
    plan = Plan(
        model=name,
        shape=shape,
        formats=sorted(fitting, key=lambda one: not is_base(one)),
        cases=tests,
        scan=scan is not None,
        settings=Settings(repetitions, not no_warmup, way),
        batches=counts[0],
        micro_batches=counts[1],
        threads=counts[2],
        device=device,
        calibration=calibration,
        memory=_memory(room, 0 if dry_run else available_memory(device)),
        limit=room,
        check=check,
        sequences=sequences or 1,
        plot=drawing,
        draw=plot == TERMINAL or sys.stderr.isatty(),
    )
    if not dry_run:
        return _runnable(plan)
    if plan.longest > shape.context_limit:
        limit = f"{shape.context_limit:,}"
        note(f"kvrt: {plan.longest:,} tokens are beyond the model's limit of {limit}")
    return plan


def _default(dry_run: bool) -> str:
    """The default model; a dry run does not pull it, but takes its shape."""
    from ..hub import DEFAULT_MODEL, resolve

    if dry_run:
        try:
            resolve(DEFAULT_MODEL)
        except ModelNotFoundError:
            return DEFAULT_SHAPE
    return default_model()


def _memory(*limits: int | None) -> int:
    """The least of what is known; 0 where nothing is."""
    return min((limit for limit in limits if limit), default=0)


def _tests(
    prompts: tuple[str, ...],
    generated: tuple[str, ...],
    pairs: tuple[str, ...],
    depths: tuple[str, ...],
) -> list[Case]:
    from ..bench.case import cases

    found = cases(
        _counts(prompts, "-p", [PROMPT]),
        _counts(generated, "-n", [GENERATED]),
        [_pair(text) for text in pairs],
        _counts(depths, "-d", [0]),
    )
    if not found:
        raise UsageError("-p and -n are 0: there is nothing to measure")
    return found


def _scan(scan: str, generated: tuple[str, ...]) -> list[Case]:
    """Decoding the last tokens of each context."""
    from ..bench.case import scan_case

    steps = _counts(generated, "-n", [SCAN_STEPS], low=1)
    if len(steps) > 1:
        raise UsageError(f"-n: a scan takes one number of tokens, got {','.join(generated)}")
    return [scan_case(context, steps[0]) for context in parse_scan(scan)]


def _counts(texts: Sequence[str], option: str, default: list[Any], low: int = 0) -> list[Any]:
    return parse_counts(",".join(texts), option, low) if texts else default


def _pair(text: str) -> tuple[int, int]:
    parts = [parse_counts(part, "-pg") for part in text.split(",")]
    if len(parts) != 2 or any(len(part) != 1 for part in parts):
        raise UsageError(f"-pg: expected P,N, such as 512,128, got {text!r:.60}")
    if not parts[0][0] + parts[1][0]:
        raise UsageError("-pg: 0 tokens of a prompt and 0 generated are nothing to measure")
    return parts[0][0], parts[1][0]


def is_base(chosen: Format) -> bool:
    """Whether a format is the one that all are compared with."""
    from ..kvstore import KVSpec

    return chosen.spec == KVSpec.parse("f16")


def _plot(plot: str | None) -> Path | None:
    from ..bench.plot import check_plot

    if plot is None or plot == TERMINAL:
        return None
    path = user_path(plot, "--plot")
    check_plot(path)
    return path


# Whether it can be run here


def _runnable(plan: Plan) -> Plan:
    """The plan less what a scan has no memory for. UsageError where nothing can be measured."""
    from ..backends import check_threads
    from ..bench.case import check_batches
    from ..source import find_source

    source = find_source(plan.model)  # refuses what is known for memory only
    if plan.check and source.synthetic:
        raise UnsupportedError(f"--check: {plan.model} has random weights, which agree on nothing")
    if plan.longest > source.context_limit:
        raise UsageError(
            f"{'--scan' if plan.scan else '-d, -p and -n'}: a context of {plan.longest:,} tokens "
            f"is beyond this model's limit of {source.context_limit:,}"
        )
    for threads in plan.threads:
        check_threads(plan.device, threads)
    for chosen in plan.formats:
        check_batches(chosen.name, chosen.spec, plan.cases, plan.settings.fill, plan.batches)
    if plan.scan:
        return replace(plan, formats=_with_room(plan))
    for chosen, case in product(plan.formats, plan.cases):
        if not _has_room(plan, chosen, case):
            raise _no_space(plan, chosen, case)
    return plan


def _with_room(plan: Plan) -> list[Format]:
    """The formats that have memory for the shortest context of a scan."""
    first = min(plan.cases, key=lambda case: case.context)
    found = [chosen for chosen in plan.formats if _has_room(plan, chosen, first)]
    if not found:
        raise _no_space(plan, plan.formats[0], first)
    for chosen in plan.formats:
        if chosen not in found:
            note(f"kvrt: left out: {_no_space(plan, chosen, first)}")
    return found


def _no_space(plan: Plan, chosen: Format, case: Case) -> UsageError:
    return UsageError(
        f"no space for {case.context:,} tokens in {chosen.name}: with the weights they need "
        f"{bytes_word(_needed(plan, chosen, case))}, there are {bytes_word(plan.memory)}"
    )


def _has_room(plan: Plan, chosen: Format, case: Case) -> bool:
    return not plan.memory or _needed(plan, chosen, case) <= plan.memory


def _needed(plan: Plan, chosen: Format, case: Case) -> int:
    """Bytes for weights, cache and what fills it."""
    from ..bench.budget import needed_bytes

    config = plan.shape.config
    assert config is not None  # a plan that can be run has one
    beside = needed_bytes(
        config, plan.shape.geometry, chosen.spec, case, plan.settings.fill,
        _largest(plan.batches), _largest(plan.micro_batches), plan.device.startswith("cuda"),
    )  # fmt: skip
    return plan.shape.weight_bytes + beside


def _largest(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


def make_jobs(plan: Plan) -> list[list[Job]]:
    """What to run, in groups whose caches have room in memory together."""
    from ..bench.measure import Job

    groups: list[list[Job]] = []
    room = 0
    for chosen in plan.formats:
        tests = _fitting_cases(plan, chosen) if plan.scan else plan.cases
        size = max(_needed(plan, chosen, case) for case in tests) - plan.shape.weight_bytes
        room -= size
        if room < 0 or not groups:
            groups.append([])
            room = (plan.memory or sys.maxsize) - plan.shape.weight_bytes - size
        groups[-1].append(Job(chosen.spec, tuple(tests)))
    if len(groups) > 1:
        note(
            f"kvrt: no space for all caches at once: timed in {len(groups)} groups, one after the "
            "other"
        )
    return groups


def _fitting_cases(plan: Plan, chosen: Format) -> list[Case]:
    """The cases of a scan that a format has memory for; a note names the first that it has not."""
    found = [case for case in plan.cases if _has_room(plan, chosen, case)]
    if len(found) < len(plan.cases):
        first = next(case for case in plan.cases if case not in found)
        size = _needed(plan, chosen, first)
        note(
            f"kvrt: {chosen.name}: contexts from {first.context:,} on are left out, they need "
            f"{bytes_word(size)} of {bytes_word(plan.memory)}"
        )
    return found
