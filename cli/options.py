"""Options that several commands share, and what their values turn into.

The words are llama.cpp's, since people paste them into scripts. Ranges live in one place,
`SamplingParams`; here an impossible value only gets the name of its option.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ..errors import ModelNotFoundError, UnsupportedError, UsageError
from .console import (
    check_unicode,
    note,
    read_stdin,
    read_text_file,
    stdin_is_terminal,
)
from .device_options import common_options
from .kv_options import KV_HELP, calibration_option, kv_side_options, resolve_kv
from .main import CommandState

if TYPE_CHECKING:
    from ..generate import Model
    from ..sampler import SamplingParams

Function = TypeVar("Function", bound=Callable[..., Any])

# Option words -> field of SamplingParams, type, help.
SAMPLING: tuple[tuple[tuple[str, ...], str, type, str], ...] = (
    (("--temp",), "temperature", float, "Temperature; 0 takes the likeliest token."),
    (("--top-k",), "top_k", int, "Draw from the N likeliest tokens; 0 is all."),
    (("--top-p",), "top_p", float, "Draw from the likeliest tokens of total probability X."),
    (("--min-p",), "min_p", float, "Drop tokens below X times the likeliest's probability."),
    (("--repeat-penalty",), "repeat_penalty", float, "Divide logits of recent tokens; 1 is off."),
    (("--repeat-last-n",), "repeat_last_n", int, "How many tokens the penalties look back at."),
    (("--presence-penalty",), "presence_penalty", float, "Lower tokens that were there; 0 is off."),
    (("--frequency-penalty",), "frequency_penalty", float, "Lower them for each time; 0 is off."),
)


@dataclass(frozen=True)
class ModelChoice:
    """Which model to load and how; None as model means the default one, pulled if absent.

    No device is the default one. `kv_is_default`: no one asked for this cache format, so a model
    that it does not fit gets f16. `check_memory`: refuse a context that has no room on a GPU.
    """

    model: str | None
    kv: str
    max_context: int | None
    device: str | None
    threads: int | None
    calibration: str | None = None
    kv_is_default: bool = False
    check_memory: bool = True


@dataclass(frozen=True)
class SamplingFlags:
    """The sampling parameters that the command line names; the model has a say in the others."""

    named: Mapping[str, Any]

    def over(self, base: SamplingParams) -> SamplingParams:
        """The parameters in effect: `base` (the model's own), changed where a flag was given."""
        return replace(base, **self.named)


def model_options(function: Function) -> Function:
    """-m, --kv and its sides, -c and the common options; gives a `choice` and `verbose`.

    The cache format is f16 where none is named.
    """
    return model_options_with("f16")(function)


def model_options_with(default_kv: str) -> Callable[[Function], Function]:
    """`model_options` whose cache format is another where none is named and where it fits."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(
            model: str | None,
            kv: str | None,
            kv_k: str | None,
            kv_v: str | None,
            calibration: str | None,
            ctx_size: int,
            device: str | None,
            threads: int | None,
            **rest: Any,
        ) -> Any:
            choice = ModelChoice(
                model,
                resolve_kv(kv, kv_k, kv_v, default_kv),
                ctx_size or None,
                device,
                threads,
                calibration,
                kv_is_default=kv is None and kv_k is None and kv_v is None,
            )
            return function(choice=choice, **rest)

        wrapped = common_options(call)
        wrapped = click.option(
            "-c",
            "--ctx-size",
            type=click.IntRange(min=0),
            default=0,
            metavar="N",
            help="Limit of cached tokens; 0 is the model's own.  [default: 0]",
        )(wrapped)
        wrapped = kv_side_options(calibration_option(wrapped))
        for option in (
            click.option("--kv", metavar="SPEC", help=f"{KV_HELP}  [default: {default_kv}]"),
            click.option(
                "-m",
                "--model",
                metavar="MODEL",
                help="A model folder, the name of a pulled model, or synthetic:NAME: random "
                "weights of a published shape.  [default: smollm2]",
            ),
        ):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def sampling_options(function: Function) -> Function:
    """The sampling flags and -s/--seed; the command gets them as `sampling`, a SamplingFlags."""
    from ..sampler import SamplingParams

    defaults = SamplingParams()

    @wraps(function)
    def call(seed: int, logit_bias: tuple[tuple[int, float], ...], **rest: Any) -> Any:
        given = {field: rest.pop(field) for _, field, _, _ in SAMPLING}
        named = {field: value for field, value in given.items() if value is not None}
        named |= {"seed": None if seed == -1 else seed, "logit_bias": logit_bias}
        return function(sampling=SamplingFlags(named), **rest)

    wrapped: Any = click.option(
        "-s",
        "--seed",
        type=click.IntRange(min=-1),
        default=-1,
        metavar="N",
        help="Seed of the draws; -1 takes another each time.  [default: -1]",
    )(call)
    wrapped = click.option(
        "-l",
        "--logit-bias",
        multiple=True,
        callback=_logit_biases,
        metavar="ID(+|-)BIAS",
        help="Add to a token's logit: 15043+1 or 15043-1. May be repeated.",
    )(wrapped)
    for words, field, kind, text in reversed(SAMPLING):
        wrapped = click.option(
            *words,
            field,
            type=kind,
            default=None,
            metavar="N" if kind is int else "X",
            callback=_sampling_value,
            help=f"{text}  [default: {_default_text(field, defaults)}]",
        )(wrapped)
    return wrapped


def _default_text(field: str, defaults: SamplingParams) -> str:
    from ..recommended import RECOMMENDABLE

    value = getattr(defaults, field)
    return f"the model's, else {value}" if field in RECOMMENDABLE else str(value)


def prompt_options(function: Function) -> Function:
    """-p/--prompt and -f/--file as `prompt` and `file`; `read_prompt` makes one text of them."""
    for option in (
        click.option("-f", "--file", metavar="FILE", help="Take the prompt from a UTF-8 file."),
        click.option("-p", "--prompt", metavar="TEXT", help="The prompt."),
    ):
        function = option(function)
    return function


def predict_option(default: int) -> Callable[[Function], Function]:
    """-n/--predict as `predict`; -1 is until a stop token or a full context."""
    return click.option(
        "-n",
        "--predict",
        "--n-predict",
        "predict",
        type=click.IntRange(min=-1),
        default=default,
        show_default=True,
        metavar="N",
        help="Generate at most N tokens; -1: until the model stops or the context is full.",
    )


def read_prompt(prompt: str | None, file: str | None) -> str | None:
    """The text of -p, -f or a piped stdin; None if there is none and stdin is a terminal."""
    if prompt is not None and file is not None:
        raise UsageError("-p and -f exclude each other: give one of them")
    if prompt is not None:
        return check_unicode(prompt, "-p")
    if file is not None:
        return read_text_file(file, "-f")
    return None if stdin_is_terminal() else read_stdin()


def open_model(choice: ModelChoice, remark: Callable[[str], None] = note) -> Model:
    """Load the chosen model; without a choice the default one, which is pulled if it is absent.

    `remark` is told where another cache format than the default one had to be taken.
    """
    from ..backends import check_device
    from ..generate import load
    from .progress import loading_progress

    if choice.device is not None:
        check_device(choice.device)  # before anything is pulled
    name = default_model() if choice.model is None else choice.model
    kv, reason = _fitting(choice.kv, name) if choice.kv_is_default else (choice.kv, "")
    with loading_progress() as progress:
        model = load(
            name,
            device=choice.device,
            kv=kv,
            max_context=choice.max_context,
            threads=choice.threads,
            calibration=choice.calibration,
            debug=_debugging(),
            progress=progress,
            check_memory=choice.check_memory,
        )
    if reason:
        remark(reason)
    return model


def _debugging() -> bool:
    """Whether --debug was given to the command that runs."""
    context = click.get_current_context(silent=True)
    return context is not None and context.ensure_object(CommandState).debug


def _fitting(kv: str, model: str) -> tuple[str, str]:
    """A default cache format, or f16 and what to say for a model that it does not fit."""
    from ..generate import cache_geometry
    from ..kvstore import KVSpec
    from ..source import find_source

    source = find_source(model)
    spec = KVSpec.parse(kv)
    try:
        spec.check(cache_geometry(source.config), source.context_limit)
    except UnsupportedError as error:
        return "f16", f"kvrt: the default cache format {kv} does not fit this model ({error}): f16"
    return kv, ""


def default_model() -> str:
    """The default model's name, after pulling it (and saying so) where it is absent."""
    from ..hub import DEFAULT_MODEL, pull, resolve

    try:
        resolve(DEFAULT_MODEL)
    except ModelNotFoundError:
        from .progress import console_progress

        note(f"kvrt: the default model {DEFAULT_MODEL} is not here yet; pulling it")
        with console_progress() as progress:
            pull(DEFAULT_MODEL, progress)
    return DEFAULT_MODEL


def sampling_with(sampling: SamplingParams, field: str, text: str) -> SamplingParams:
    """The parameters with one field read from text. Raises UsageError for an impossible value."""
    kind: type = int if field == "seed" else next(k for _, f, k, _ in SAMPLING if f == field)
    try:
        value = kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{field} must be {what}, got {text!r}") from None
    if field == "seed" and value == -1:
        value = None
    return replace(sampling, **{field: value})


def _sampling_value(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    from ..sampler import SamplingParams

    if value is None:
        return None
    try:
        SamplingParams(**{str(parameter.name): value})
    except UsageError as error:
        raise click.BadParameter(str(error), context, parameter) from None
    return value


def _logit_biases(
    context: click.Context, parameter: click.Parameter, values: Sequence[str]
) -> tuple[tuple[int, float], ...]:
    biases = []
    for text in values:
        match = re.fullmatch(r"(\d+)([+-](?:\d+\.?\d*|\.\d+|inf))", text)
        if match is None:
            raise click.BadParameter(
                f"{text!r} is not of the form ID+BIAS or ID-BIAS, such as 15043-1.5",
                context,
                parameter,
            )
        biases.append((int(match[1]), float(match[2])))
    _check_biases(context, parameter, tuple(biases))
    return tuple(biases)


def _check_biases(
    context: click.Context, parameter: click.Parameter, biases: tuple[tuple[int, float], ...]
) -> None:
    from ..sampler import SamplingParams

    try:
        SamplingParams(logit_bias=biases)
    except UsageError as error:
        raise click.BadParameter(str(error), context, parameter) from None
