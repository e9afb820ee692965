"""`unipar checkpoint`, whose commands are in the files beside this one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import typer

from unipar.cli.commands.options import EXIT_CODES_HELP

HELP = """Look at checkpoints, and carry weights and state into and out of them.

    \b
    unipar checkpoint list runs/char_gpt              steps, sizes, metrics; which are whole
    unipar checkpoint inspect runs/char_gpt           the newest: tensors, and the state in words
    unipar checkpoint verify runs/char_gpt            every hash
    unipar checkpoint diff A B                        which tensors differ, and by how much
    unipar checkpoint export runs/char_gpt --to hf    weights for other libraries
    unipar checkpoint import train.yaml zero3/        a checkpoint of another library, for `unipar run --from`
    """

CHECKPOINT_COMMANDS = {
    "list": "list:print_list",
    "inspect": "inspect:inspect",
    "verify": "verify:verify",
    "diff": "diff:diff",
    "export": "export:export",
    "import": "import_:import_",
}
"""Module beside this one and function of each command, in the order of `--help`."""


def build_group() -> typer.Typer:
    """Return the group of commands."""
    app = typer.Typer(help=HELP, epilog=EXIT_CODES_HELP, no_args_is_help=True, rich_markup_mode=None)
    for name, home in CHECKPOINT_COMMANDS.items():
        module, _, function = home.partition(":")
        command: Callable[..., None] = getattr(import_module(f"unipar.cli.commands.checkpoint.{module}"), function)
        app.command(name, epilog=EXIT_CODES_HELP)(command)
    return app
