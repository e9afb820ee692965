"""The program `unipar`: its commands by name, and what becomes of an error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typing_extensions import override

from unipar.cli.commands.options import EXIT_CODES_HELP, VersionOption
from unipar.distributed.launchers import without_launcher_arguments
from unipar.errors import UniparError
from unipar.launcher.processes import early
from unipar.utils.tracebacks import user_place_of

HELP = """One PyTorch training loop under many backends, from one config.

    \b
    unipar compare configs/quickstart.yaml     the same training in every strategy, as a table
    unipar check configs/char_gpt.yaml         would it start? answered without torch
    unipar explain configs/char_gpt.yaml       every value, and where it came from
    unipar verify configs/char_gpt.yaml        do all strategies give the numbers of one process?
    unipar plan configs/char_gpt.yaml          what will fit, before anything runs
    unipar run configs/char_gpt.yaml           train
    unipar observe -- torchrun ... train.py    what a script does that nobody changed
    unipar submit train.yaml --on slurm        the same on several machines
    """

COMMANDS = {
    "run": "run:run",
    "compare": "compare:compare",
    "scale": "scale:scale",
    "submit": "machines.submit:submit",
    "jobs": "machines.jobs:build_jobs_group",
    "runs": "report:print_runs",
    "report": "report:report",
    "trace": "trace:print_traces",
    "verify": "verify:verify",
    "observe": "observe:observe",
    "checkpoint": "checkpoint.group:build_group",
    "check": "config.check:check_run",
    "init": "config.init:init",
    "explain": "config.explain:explain",
    "plan": "config.plan:plan",
    "export": "convert:export",
    "import": "convert:import_",
    "schema": "config.schema:build_schema",
    "backends": "backends:print_backends",
    "doctor": "doctor:run_doctor",
    "install": "backends:install",
}
"""Module in unipar.cli.commands and function of each command, in the order of `--help`."""

WITH_COMMAND = ("observe",)
"""Commands whose arguments are another command, with options of its own."""

GROUPS = ("checkpoint", "jobs")
"""Commands that have commands of their own; their function returns them."""


class _Command(TyperCommand):
    """Command that answers another library's option with the key that says the same."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as e:
            from unipar.config.foreign_words import advise_on_key

            option = getattr(e, "option_name", None)  # of click's NoSuchOption, of which typer may have its own copy
            if option and (advice := advise_on_key(option)):
                error: Any = e
                error.message += f"; {advice}; --set KEY=VALUE changes a key"
                error.possibilities = None
            raise


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the program with some of its commands; only their modules are imported."""
    app = typer.Typer(
        help=HELP,
        epilog=EXIT_CODES_HELP,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_common_options)
    for name in names:
        module, _, function = COMMANDS[name].partition(":")
        command: Callable[..., Any] = getattr(import_module(f"unipar.cli.commands.{module}"), function)
        if name in GROUPS:
            app.add_typer(command(), name=name)
        else:
            settings = {"allow_interspersed_args": name not in WITH_COMMAND}
            app.command(name, cls=_Command, epilog=EXIT_CODES_HELP, context_settings=settings)(command)
    return app


def main() -> None:
    """Run the program: print an error as one short paragraph; with `--debug`, anywhere, print its traceback first."""
    words = without_launcher_arguments(sys.argv[1:])
    del sys.argv[1:]  # a task's file has no arguments here; what it sets by itself are their defaults
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    asked = next((word for word in words if not word.startswith("-")), "")
    if asked == "run" and "--help" not in words:
        early.begin_imports()
    try:
        build_app([asked] if asked in COMMANDS else COMMANDS)(words, prog_name="unipar")
    except UniparError as e:
        _exit_with_error(e, str(e), e.code, debug=debug)
    except Exception as e:  # a defect of unipar, or an error of the user's own code
        place = user_place_of(e)
        hint = f" ({place})" if place else "" if debug else " (unexpected; --debug shows where)"
        _exit_with_error(e, f"{type(e).__name__}: {e}{hint}", 1, debug=debug)
    finally:
        early.end_imports()


def _exit_with_error(error: BaseException, message: str, code: int, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    typer.echo(f"unipar: {message}", err=True)
    sys.exit(code)


def _common_options(
    *,
    version: VersionOption = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None: ...
