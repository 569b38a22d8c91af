"""`kvrt bench`: memory and speed of cache formats against context, in llama-bench's shape."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import click

from ..bench.axes import bytes_word
from .bench_plan import Plan, bench_options, is_base, make_jobs, make_plan
from .bench_tables import (
    ScanReport,
    case_columns,
    memory_columns,
    scan_columns,
    trend_columns,
    trend_row,
)
from .console import emit, note, wants_colour
from .device_options import device_options
from .kv_options import (
    DEFAULT_FORMATS,
    calibration_option,
    kv_list_options,
    note_unpacked,
)
from .options import ModelChoice, open_model
from .report import Write, make_report, output_options

if TYPE_CHECKING:
    from ..bench.case import Settings
    from ..bench.check import Agreement
    from ..bench.measure import Bench, Job
    from ..bench.plot import Series
    from ..bench.result import Measured
    from ..bench.rows import Row, Setup
    from ..generate import Model

Outputs = list[tuple[str, Write]]


@click.command("bench")
@bench_options
@kv_list_options(DEFAULT_FORMATS)
@calibration_option
@output_options("md")
@device_options
def command(output: str, output_err: str | None, dry_run: bool, **options: Any) -> None:
    """Measure memory and speed of cache formats against context.

    Tests are named as llama-bench names them: pp512 computes a prompt of 512 tokens, tg128
    generates 128, and @ d4096 does it behind 4,096 cached tokens. Loading, tokenising and sampling
    are not timed. Each test runs once before, with no other cache in memory, which gives its peak;
    then all formats are timed in turn. GB/s is what a decoded token reads, weights and cache,
    beside what the device's memory can give. With --scan: what a context costs, and from which on
    a format is faster than f16.
    """
    plan = make_plan(dry_run=dry_run, **options)
    outputs: Outputs = [(output, emit)]
    if output_err is not None:
        outputs.append((output_err, _emit_err))
    if dry_run:
        _dry_run(plan, outputs)
    elif plan.scan:
        _scan(plan, outputs)
    else:
        _tests(plan, outputs)


def _emit_err(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _dry_run(plan: Plan, outputs: Outputs) -> None:
    from ..bench.rows import memory_row

    tests = [] if plan.scan else [case.name for case in plan.cases]
    columns = memory_columns(plan.names, tests)
    with ExitStack() as stack:
        reports = [stack.enter_context(make_report(kind, columns, to)) for kind, to in outputs]
        shape = plan.shape
        for report in reports:
            report.heading(
                f"{plan.model}: {shape.parameters / 1e9:.2f} G parameters, "
                f"{bytes_word(shape.weight_bytes)}; nothing was run"
            )
        for chosen in plan.formats:
            fits = plan.fits(chosen)
            for case in plan.cases:
                row = memory_row(chosen.name, shape, chosen.spec, case.context, plan.sequences)
                row = ({} if plan.scan else {"test": case.name}) | row | {"fits_tokens": fits}
                for report in reports:
                    report.row(row)


@dataclass(frozen=True)
class Run:
    """A loaded model with its settings, and what its rows share."""

    model: Model
    bench: Bench
    setup: Setup
    agreements: dict[str, Agreement]


def _for_each_run(plan: Plan, progress: _Progress, use: Callable[[Run], None]) -> None:
    """Call `use` for each combination of threads and batch sizes; one model is held at a time."""
    from ..bench.environment import software

    facts = software()
    for threads in plan.threads:
        _with_threads(plan, progress, threads, facts, use)


def _with_threads(
    plan: Plan,
    progress: _Progress,
    threads: int | None,
    facts: Mapping[str, Any],
    use: Callable[[Run], None],
) -> None:
    from ..bench.gpu import device_of, limit_memory
    from ..bench.measure import Bench
    from ..bench.rows import Setup
    from ..source import PREFIX

    model = _load(plan, threads)
    bandwidth = model.ops.read_bandwidth()
    device = model.ops.device_name  # of a CPU it says the threads, of a GPU everything
    if device_of(model.ops) is None:
        device = f"{model.ops.hardware}, {device}"
    note(f"kvrt: {device}: memory is read at {bandwidth / 1e9:.1f} GB/s")
    if plan.limit is not None:
        limit_memory(model.ops, plan.limit)  # after the probe, which is no part of a run
    agreements = _agreements(plan, model, progress)
    fitted = plan.calibration is not None or not plan.model.startswith(PREFIX)
    for batch, micro_batch in product(plan.batches, plan.micro_batches):
        if micro_batch is not None:
            model.decoder.chunk_tokens = micro_batch
        settings = replace(plan.settings, batch=batch)
        setup = Setup(model, settings.fill, batch, bandwidth, facts, plan.limit, fitted)
        use(Run(model, Bench(model, settings, told=progress.told), setup, agreements))


def _load(plan: Plan, threads: int | None) -> Model:
    """The model; what a format needs and the model has not is missed now."""
    from ..bench.check import CONTEXT, STEPS

    longest = plan.longest
    if plan.check:
        longest = max(longest, min(CONTEXT + STEPS, plan.shape.context_limit))
        context = min(CONTEXT, plan.shape.context_limit - STEPS)
        note_unpacked(plan.formats, context, prompt=context)
    calibrated = [chosen for chosen in plan.formats if chosen.spec.calibrated]
    spec = (calibrated or plan.formats)[0].spec
    choice = ModelChoice(
        plan.model, str(spec), longest, plan.device, threads, plan.calibration,
        check_memory=False,  # the plan has seen to it, format by format
    )  # fmt: skip
    return open_model(choice)


def _agreements(plan: Plan, model: Model, progress: _Progress) -> dict[str, Agreement]:
    from ..bench.check import agreements

    if not plan.check:
        return {}
    specs = [chosen.spec for chosen in plan.formats]
    found = agreements(model, specs, partial(progress.told, stage="check"))
    return dict(zip(plan.names, found))


class _Progress:
    """The bar on stderr, which goes away while rows are printed."""

    def __init__(self, plan: Plan, groups: Sequence[Sequence[Job]]) -> None:
        from ..bench import check, measure
        from .progress import console_progress, tokens

        self._bar = console_progress(tokens)
        runs = len(plan.batches) * len(plan.micro_batches)
        total = runs * sum(measure.planned_tokens(jobs, plan.settings) for jobs in groups)
        if plan.check:
            total += check.planned_tokens(len(plan.formats))
        self._total = total * len(plan.threads)
        self._done = 0

    def told(self, count: int, stage: str = "measure") -> None:
        """So many tokens more are done."""
        self._done += count
        self._bar(stage, self._done, self._total)

    def wrap(self, write: Write) -> Write:
        """A way to write that takes the bar away before."""

        def written(text: str) -> None:
            self._bar.close()
            write(text)

        return written

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()


def _tests(plan: Plan, outputs: Outputs) -> None:
    from ..bench.rows import case_row

    groups = make_jobs(plan)
    tests = [case.name for case in plan.cases]
    columns = case_columns(plan.model, plan.names, tests, plan.varied, plan.check)
    with _Progress(plan, groups) as progress, ExitStack() as stack:
        reports = [
            stack.enter_context(make_report(kind, columns, progress.wrap(write)))
            for kind, write in outputs
        ]

        def measure(run: Run) -> None:
            for name, found in _measured(plan, run, groups):
                row = case_row(name, found, run.setup, run.agreements.get(name))
                for report in reports:
                    report.row(row)

        _for_each_run(plan, progress, measure)


def _measured(
    plan: Plan, run: Run, groups: Sequence[Sequence[Job]]
) -> Iterator[tuple[str, Measured]]:
    """All that is measured in one run, with the formats' names."""
    names = {chosen.spec: chosen.name for chosen in plan.formats}
    for jobs in groups:
        for job, found in run.bench.run(jobs):
            yield names[job.spec], found


def _scan(plan: Plan, outputs: Outputs) -> None:
    groups = make_jobs(plan)
    columns = scan_columns(plan.names, plan.varied, plan.check)
    trends = trend_columns(plan.names, plan.varied)
    with _Progress(plan, groups) as progress, ExitStack() as stack:
        scan = _Scan(plan)
        stack.callback(scan.draw)  # after the tables; what an interrupt has left, too
        for kind, write in outputs:
            report = ScanReport(kind, columns, trends, progress.wrap(write))
            scan.reports.append(stack.enter_context(report))
        _for_each_run(plan, progress, lambda run: scan.measure(run, groups))


class _Scan:
    """The contexts of all formats, as they are measured, reported and drawn."""

    def __init__(self, plan: Plan) -> None:
        self.reports: list[ScanReport] = []
        self._plan = plan
        self._series: list[Series] = []
        self._about = ""

    def measure(self, run: Run, groups: Sequence[Sequence[Job]]) -> None:
        """Measure each format at each context; what an interrupt leaves is reported too."""
        from ..bench.rows import scan_row

        rows: dict[str, list[Row]] = {}
        try:
            for name, found in _measured(self._plan, run, groups):
                row = scan_row(name, found, run.setup, run.agreements.get(name))
                rows.setdefault(name, []).append(row)
                for report in self.reports:
                    report.point(row)
        finally:
            self._finish(rows)

    def _finish(self, rows: Mapping[str, Sequence[Row]]) -> None:
        """Fit a line to the rows of each format, and tell what it says beside that of f16."""
        from ..bench.plot import Series
        from ..bench.rows import trend_fields, trend_line, trend_start

        done = [chosen for chosen in self._plan.formats if chosen.name in rows]
        lines = {chosen.name: trend_line(rows[chosen.name], chosen.spec) for chosen in done}
        base = next((lines[chosen.name] for chosen in done if is_base(chosen)), None)
        complete: list[list[Row]] = []
        for chosen in done:
            own = rows[chosen.name]
            start = trend_start(own, chosen.spec)
            fields = trend_fields(lines[chosen.name], base, self._plan.fits(chosen), start)
            complete.append([row | fields for row in own])
            varied = [f", {field} {own[0][field]}" for field in self._plan.varied]
            self._series.append(
                Series(
                    name=chosen.name + "".join(varied),
                    contexts=[row["context"] for row in own],
                    cache_bytes=[row["cache_bytes"] for row in own],
                    peak_bytes=[row["peak_bytes"] for row in own],
                    decode_us=[row["decode_us"] for row in own],
                    # Where only longer prompts are compressed, times do not follow one line.
                    line=None if chosen.spec.compression else lines[chosen.name],
                )
            )
            self._about = _about(own[0])
        for report in self.reports:  # last: stdout may have gone
            for chosen, own in zip(done, complete):
                report.trend(own, trend_row(own[-1], is_base(chosen), base is not None))

    def draw(self) -> None:
        """Draw what was measured, where it was asked for."""
        if not self._series:
            return
        plan = self._plan
        if plan.plot is not None:
            from ..bench.plot import write_plot

            write_plot(plan.plot, self._series, self._about, _how(plan.settings))
            note(f"kvrt: drawn into {plan.plot}")
        if plan.draw:
            from ..bench.term_plot import draw

            width = min(max(shutil.get_terminal_size().columns, 60), 200)
            _emit_err(
                "\n" + draw(self._series, width, 16, colour=wants_colour(None, sys.stderr)) + "\n"
            )


def _about(row: Row) -> str:
    """What was measured on what, for the head of a chart."""
    threads = "" if row["backend"] == "cuda" else ", {threads} threads".format_map(row)
    return "{model} on {device}".format_map(row) + threads


def _how(settings: Settings) -> str:
    filled = {
        "prefill": "caches filled by a real prefill",
        "synthetic": "caches filled with random keys and values",
    }[settings.fill]
    return f"{filled}, means of {settings.repetitions} repetitions"
