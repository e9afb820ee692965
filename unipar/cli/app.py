"""The program `unipar`: its commands by name, and what becomes of an error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from unipar.cli.commands.backends import install, print_backends
from unipar.cli.commands.check import check_run
from unipar.cli.commands.compare import compare
from unipar.cli.commands.convert import export, import_
from unipar.cli.commands.doctor import run_doctor
from unipar.cli.commands.explain import explain
from unipar.cli.commands.options import EXIT_CODES_HELP, VersionOption
from unipar.cli.commands.report import report
from unipar.cli.commands.run import run
from unipar.cli.commands.scale import scale
from unipar.cli.commands.schema import build_schema
from unipar.cli.commands.verify import verify
from unipar.distributed.launchers import without_launcher_arguments
from unipar.errors import UniparError

app = typer.Typer(
    help="""One PyTorch training loop under many backends, from one config.

    \b
    unipar compare configs/quickstart.yaml     the same training in every cell, as a table
    unipar check configs/char_gpt.yaml         would it start? answered without torch
    unipar explain configs/char_gpt.yaml       every value, and where it came from
    unipar verify configs/char_gpt.yaml        do all cells give the numbers of one process?
    unipar run configs/char_gpt.yaml           train
    """,
    epilog=EXIT_CODES_HELP,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the program: print an error as one short paragraph; with `--debug`, anywhere, print its traceback first."""
    words = without_launcher_arguments(sys.argv[1:])
    debug = "--debug" in words
    try:
        app([word for word in words if word != "--debug"], prog_name="unipar")
    except UniparError as e:
        _exit_with_error(e, str(e), e.code, debug=debug)
    except Exception as e:  # a defect of unipar, or an error of the user's own code
        hint = "" if debug else " (unexpected; --debug shows where)"
        _exit_with_error(e, f"{type(e).__name__}: {e}{hint}", 1, debug=debug)


def _exit_with_error(error: BaseException, message: str, code: int, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    typer.echo(f"unipar: {message}", err=True)
    sys.exit(code)


@app.callback()
def _common_options(
    *,
    version: VersionOption = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None: ...


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "compare": compare,
    "scale": scale,
    "report": report,
    "verify": verify,
    "check": check_run,
    "explain": explain,
    "export": export,
    "import": import_,
    "schema": build_schema,
    "backends": print_backends,
    "doctor": run_doctor,
    "install": install,
}
"""Function of each command, in the order of `--help`."""

for name, command in COMMANDS.items():
    app.command(name, epilog=EXIT_CODES_HELP)(command)
