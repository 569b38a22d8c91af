"""The options that every command takes: where to compute, and how much to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from .console import show_log
from .main import debug_option

Function = TypeVar("Function", bound=Callable[..., Any])


def _named_device(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    """A name that could be a device's, or None: commands that compute nothing look for none."""
    from ..backends import check_device_name

    if value is not None:
        check_device_name(value)
    return value


def _chosen_device(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    from ..backends import default_device

    return _named_device(context, parameter, value) or default_device()


def common_options(function: Function) -> Function:
    """--device, -t/--threads, -v/--verbose as `device`, `threads`, `verbose`; and --debug.

    The device is a name that was not tried, None for the default.
    """
    threads = click.option(
        "-t",
        "--threads",
        type=click.IntRange(min=1),
        metavar="N",
        help="Threads of the CPU to compute with.  [default: all cores]",
    )
    return _with_device(threads(function), _named_device)


def device_options(function: Function) -> Function:
    """--device, -v/--verbose as `device`, `verbose`; and --debug.

    The device is the default one where none is named; a name was not tried.
    """
    return _with_device(function, _chosen_device)


def _with_device(function: Function, callback: Callable[..., Any]) -> Function:
    for option in (
        debug_option,
        click.option(
            "-v", "--verbose", is_flag=True, callback=_verbose, help="Say more, on stderr."
        ),
        click.option(
            "--device",
            metavar="NAME",
            callback=callback,
            help="Where to compute: cpu, cuda or cuda:N.  [default: cuda where it can be used, "
            "else cpu]",
        ),
    ):
        function = option(function)
    return function


def _verbose(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    if value:
        show_log(verbose=True)
    return value
