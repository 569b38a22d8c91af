"""`kvrt eval needle` and `kvrt eval kvretrieval`: what is found again in a packed cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from ..errors import UsageError
from .console import emit, note, user_path, wants_colour
from .eval_job import Job, job_options, text_option, token_progress
from .options import open_model
from .ranges import parse_scan
from .report import Column, make_report

if TYPE_CHECKING:
    from ..evaluate_retrieval import Form, Recall
    from ..generate import Model
    from ..heatmap import Heatmap
    from ..retrieval_tasks import Task

Function = TypeVar("Function", bound=Callable[..., Any])

_QUESTIONS: dict[str, tuple[Form, ...]] = {
    "inside": ("inside",),
    "after": ("after",),
    "both": ("inside", "after"),
}
_LEAST = 128  # tokens of a prompt with its answer; no chat format has room in less


@dataclass(frozen=True)
class Grid:
    """What is asked, and where the picture of it goes."""

    lengths: Sequence[int]
    depths: Sequence[float]
    samples: int
    forms: Sequence[Form]
    seed: int
    plot: Path | None


def grid_options(function: Function) -> Function:
    """--lengths, --depths, --samples, --question, --seed and --plot as `grid`."""

    @wraps(function)
    def call(
        lengths: str,
        depths: int,
        samples: int,
        question: str,
        seed: int,
        plot: str | None,
        **rest: Any,
    ) -> Any:
        from ..bench.plot import check_plot
        from ..evaluate_retrieval import even_depths

        path = None if plot is None else user_path(plot, "--plot")
        if path is not None:
            check_plot(path)
        grid = Grid(
            parse_scan(lengths, "--lengths", _LEAST), even_depths(depths), samples,
            _QUESTIONS[question], seed, path,
        )  # fmt: skip
        return function(grid=grid, **rest)

    wrapped: Any = call
    for option in (
        click.option(
            "--plot", metavar="FILE", help="Draw heat maps into FILE, a .png or .svg (matplotlib)."
        ),
        click.option(
            "-s",
            "--seed",
            type=click.IntRange(min=0),
            default=0,
            show_default=True,
            metavar="N",
            help="Seed of the prompts; every format gets the same ones.",
        ),
        click.option(
            "--question",
            type=click.Choice(list(_QUESTIONS)),
            default="inside",
            show_default=True,
            help="Inside the prompt, where a format that packs the prompt can see it, or after it, "
            "as a prompt of its own on the packed cache.",
        ),
        click.option(
            "--samples",
            type=click.IntRange(min=1),
            default=4,
            show_default=True,
            metavar="N",
            help="Questions at each length and depth.",
        ),
        click.option(
            "--depths",
            type=click.IntRange(1, 101),
            default=5,
            show_default=True,
            metavar="N",
            help="Places of the answer, evenly from the beginning to the end.",
        ),
        click.option(
            "--lengths",
            default="1k,2k,4k",
            show_default=True,
            metavar="N[,N]...",
            help="Tokens of a prompt with its answer; A:B doubles from A to B.",
        ),
    ):
        wrapped = option(wrapped)
    return cast(Function, wrapped)


@click.command("needle")
@job_options
@text_option(False, "A UTF-8 text to hide it in. May be repeated.  [default: made-up sentences]")
@grid_options
def needle(job: Job, grid: Grid) -> None:
    """A number hidden in a long text: how often is it found, by length and depth.

    The text and a question about the number are a message in the model's chat format. The answer
    is begun, up to the number, and goes on greedily; it is right if it holds exactly that number.
    """
    from ..retrieval_tasks import Needle

    text = "\n\n".join(text for _, text in job.texts) or None

    def make(model: Model) -> Task:
        return Needle(model.tokenizer, max(grid.lengths), text)

    _measure(job, grid, make)


@click.command("kvretrieval")
@job_options
@grid_options
@click.option(
    "--ask",
    type=click.Choice(["one", "several"]),
    default="one",
    show_default=True,
    help="How many keys are asked for in a list: one, or one at each depth, each on a fork of the "
    "same cache where the question comes after.",
)
def kvretrieval(job: Job, grid: Grid, ask: str) -> None:
    """Lines of keys and values: how often is a key's value found, by length and depth.

    As `needle`, but all of the context looks like the answer. Four other keys are asked for as
    well, and their lines begin the answer, to show what it looks like.
    """
    from ..retrieval_tasks import Pairs

    _measure(job, grid, lambda model: Pairs(model.tokenizer, several=ask == "several"))


def _measure(job: Job, grid: Grid, make: Callable[[Model], Task]) -> None:
    from ..evaluate_retrieval import measure_retrieval

    limit, longest = job.config.max_context, max(grid.lengths)
    if longest > limit:
        raise UsageError(
            f"--lengths: {longest:,} tokens are beyond this model's context of {limit:,}"
        )
    model = open_model(job.choice)
    task = make(model)
    with token_progress() as progress:
        rows = measure_retrieval(
            model, job.specs, task, grid.lengths, grid.depths, grid.samples, grid.forms,
            seed=grid.seed, progress=progress,
        )  # fmt: skip
    names = {str(measured.spec): measured.name for measured in job.formats}
    rows = [replace(row, kv=names[row.kv]) for row in rows]
    about = f"{task.name} with {model.name} on {model.ops.device_name}"
    told = f"exact answers in %, {grid.samples} at each length and depth, seed {grid.seed}"
    heatmaps = _heatmaps(rows, grid)
    if job.output == "table":
        colour = wants_colour(None, sys.stdout)
        emit(f"{about}: {told}\n")
        from ..heatmap import draw

        for one in heatmaps:
            emit(f"\n{draw(one, colour)}\n")
    else:
        with make_report(job.output, COLUMNS, emit) as report:
            report.heading(f"{about}: {told}")
            report.attach(device=model.ops.device_name, seed=grid.seed)
            for row in rows:
                report.row(asdict(row))
    if grid.plot is not None:
        from ..heatmap import write_heatmaps

        write_heatmaps(grid.plot, heatmaps, about, told)
        note(f"kvrt: drawn into {grid.plot}")


def _heatmaps(rows: Sequence[Recall], grid: Grid) -> list[Heatmap]:
    """One for each format and form of the question, in the order of the rows."""
    from ..evaluate_retrieval import overall
    from ..heatmap import Heatmap

    groups: dict[tuple[str, str], list[Recall]] = {}
    for row in rows:
        groups.setdefault((row.kv, row.question), []).append(row)
    heatmaps = []
    for (kv, question), own in groups.items():
        mean, error = overall(own)
        shares = {(row.depth, row.length): row.exact_match for row in own}
        heatmaps.append(
            Heatmap(
                name=kv,
                lengths=grid.lengths,
                depths=grid.depths,
                shares=[[shares[at, length] for length in grid.lengths] for at in grid.depths],
                note=f"{_share(mean, error)} %, question {question}",
            )
        )
    return heatmaps


def _share(share: float, error: float | None) -> str:
    return f"{share:.0f}" if error is None else f"{share:.0f} ± {error:.0f}"


COLUMNS = (
    Column("kv", "cache", left=True),
    Column("question", "question", left=True),
    Column("length", "length", "{:,}".format),
    Column("depth", "depth %", "{:.0f}".format),
    Column(("exact_match", "exact_match_se"), "exact %", _share),
    Column("samples", "samples"),
    Column("bits_per_element", "bits", "{:.2f}".format),
    Column("seconds", "seconds", "{:.1f}".format),
)
