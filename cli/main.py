"""The `kvrt` command: finds the subcommand, imports it on use, and turns errors into exit codes.

Exit codes: 0 done, 1 a run failed, 2 wrong usage or an unsupported combination, 130 interrupted.
"""

from __future__ import annotations

import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import click

from .. import __version__
from ..errors import KvrtError

COMMANDS = {
    "chat": "Talk with a model in the terminal, or ask it one question.",
    "generate": "Continue a text.",
    "bench": "Measure memory and speed of cache formats against context.",
    "eval": "Measure what cache formats cost in quality.",
    "info": "Show a model's shape and what its cache costs.",
    "calibrate": "Fit the tables that some cache formats need.",
    "pull": "Fetch a model.",
    "convert": "Turn a GGUF file into a model folder.",
    "doctor": "Show what is installed, which devices there are and what works.",
}
INTERRUPTED = 130


@dataclass
class CommandState:
    """What the error handler must know of a command line; lives in the click context's `obj`."""

    debug: bool = False


def set_debug(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Callback of every `--debug`: remember it in the context."""
    if value:
        context.ensure_object(CommandState).debug = True


class LazyGroup(click.Group):
    """A group whose commands are modules beside this one, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = import_module(f".{cmd_name}", __package__).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
            ctx.fail(f"no such command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=set_debug,
    help="Show the traceback of an error; check all numbers that go into the cache.",
)


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="kvrt", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def cli(context: click.Context) -> None:
    """A torch-free runtime for Llama-family models, built around its KV cache."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def run(args: Sequence[str], group: click.Group = cli) -> int:
    """Run one command line and give its exit code; every error ends as one line on stderr."""
    from .console import prepare_streams, show_log

    prepare_streams()
    show_log(verbose=False)
    state = CommandState()
    try:
        with group.make_context("kvrt", list(args), obj=state) as context:
            group.invoke(context)
        return _flushed(0)
    except click.exceptions.Exit as stop:
        return _flushed(stop.exit_code)
    except BaseException as error:
        return _report(error, state.debug)


def _flushed(code: int) -> int:
    from .console import emit

    try:
        emit("")
    except (BrokenPipeError, KvrtError) as error:
        return _report(error, debug=False)
    return code


def _report(error: BaseException, debug: bool) -> int:
    """Say what went wrong, on one line, and give the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)  # what is still buffered can go nowhere
    try:
        if debug and not isinstance(error, BrokenPipeError):
            traceback.print_exception(error)
        return _explain(error)
    except BrokenPipeError:  # stderr is gone as well
        return _quiet_exit()


def _explain(error: BaseException) -> int:
    from .console import error_line

    if isinstance(error, BrokenPipeError):
        return _quiet_exit()
    if isinstance(error, KvrtError):
        error_line(str(error))
        return error.exit_code
    if isinstance(error, click.ClickException):
        error_line(error.format_message())
        return error.exit_code
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return INTERRUPTED
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, MemoryError):
        error_line(f"out of memory: {error}" if str(error) else "out of memory")
        return KvrtError.exit_code
    text = str(error) or "no message"
    error_line(f"internal error: {type(error).__name__}: {text}; --debug shows the traceback")
    return 1


def _quiet_exit() -> int:
    """The reader of our output has left: end without a word, and let the interpreter end so too."""
    _silence(sys.stderr)
    return 1


def _silence(stream: Any) -> None:
    """Point a stream's descriptor to nowhere, so that the flush at exit cannot fail."""
    with suppress(OSError, ValueError):  # a stream without a descriptor has nothing to flush to
        target = os.open(os.devnull, os.O_WRONLY)
        os.dup2(target, stream.fileno())
        os.close(target)


def main() -> None:
    """The entry point of the `kvrt` script and of `python -m kvrt`."""
    if "_KVRT_COMPLETE" in os.environ:  # click's shell completion
        cli.main(prog_name="kvrt")
    sys.exit(run(sys.argv[1:]))
