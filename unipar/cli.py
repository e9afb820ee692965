"""The command line: parse, call one function, print."""

from __future__ import annotations

import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from unipar.errors import UniparError
from unipar.flags import CELL, EXITS, AsJson, Cells, File, InCell, Out, Overwrite, Sets, Sizes, Version, apart
from unipar.place import without_launcher_arguments

if TYPE_CHECKING:
    from unipar.report.comparison import Found
    from unipar.report.verdicts import Verdicts
    from unipar.source import Source

app = typer.Typer(
    help="""One PyTorch training loop under many backends, from one config.

    \b
    unipar compare configs/quickstart.yaml     the same training in every cell, as a table
    unipar check configs/char_gpt.yaml         would it start? answered without torch
    unipar explain configs/char_gpt.yaml       every value, and where it came from
    unipar verify configs/char_gpt.yaml        do all cells give one process's numbers?
    unipar run configs/char_gpt.yaml           train
    """,
    epilog=EXITS,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The program. Its errors are one short paragraph; `--debug`, anywhere, shows where they came from."""
    words = without_launcher_arguments(sys.argv[1:])
    debug = "--debug" in words
    try:
        app([word for word in words if word != "--debug"], prog_name="unipar")
    except UniparError as e:
        _leave(e, str(e), e.code, debug=debug)
    except Exception as e:  # the last stop: what nobody foresaw
        hint = "" if debug else " (unforeseen; --debug shows where)"
        _leave(e, f"{type(e).__name__}: {e}{hint}", 1, debug=debug)


def _leave(error: BaseException, message: str, code: int, *, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    typer.echo(f"unipar: {message}", err=True)
    sys.exit(code)


@app.callback()
def _common(
    *,
    version: Version = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None: ...


def _say(found: Found | Verdicts, more: str = "") -> NoReturn:
    """Its table, what else there is to say, and its exit code."""
    typer.echo(found.table(shutil.get_terminal_size().columns) + more)
    raise typer.Exit(found.code)


def _read(file: Path, sets: list[str] | None, cell: str | None = None, out: str | None = None) -> Source:
    from unipar.checks import in_cell, read_source
    from unipar.config import Cell

    source = read_source(file, sets or ())
    if cell is not None:
        source = in_cell(source, Cell.parse(cell))
    return source if out is None else source.with_out(out)


@app.command(epilog=EXITS)
def run(file: File, cell: InCell = None, sets: Sets = None, out: Out = None, *, overwrite: Overwrite = False) -> None:
    """Train what FILE says.

    \b
    unipar run configs/char_gpt.yaml
    unipar run configs/char_gpt.yaml --backend deepspeed/gradients --set train.steps=100
    torchrun --nproc-per-node 2 -m unipar run configs/char_gpt.yaml
    """
    source = _read(file, sets, cell, out)
    from unipar.devices import found
    from unipar.launcher import launch

    report = launch(source, overwrite=overwrite)
    place = found()
    if place is None or place.rank == 0:  # the other ranks of a foreign world share this terminal
        typer.echo(str(report))


@app.command(epilog=EXITS)
def compare(
    file: File,
    cells: Cells = None,
    world: Sizes = None,
    sets: Sets = None,
    out: Out = None,
    *,
    overwrite: Overwrite = False,
) -> None:
    """The same training in many cells.

    They take turns: do their losses agree, and what does each cost? What was interrupted goes on
    with the cells that did not come to their end. With several worlds, a comparison each.

    \b
    unipar compare configs/quickstart.yaml
    unipar compare configs/quickstart.yaml --world 1,2,4
    unipar compare configs/quickstart.yaml --cell native/nothing --cell 'deepspeed/*' --overwrite
    """
    source = _read(file, sets, out=out)
    from unipar.verbs.compare import compare as compared
    from unipar.verbs.compare import onwards

    sizes = int(world) if world is not None and world.isdecimal() else world
    found = compared(source, cells=cells or (), world=sizes, overwrite=overwrite)
    _say(found, "" if found.code or world else onwards(file))


@app.command(epilog=EXITS)
def scale(
    file: File,
    world: Annotated[
        str, typer.Option("--world", metavar="N,N,...", help="Sizes of worlds: 1,2,4.", show_default=False)
    ],
    cells: Cells = None,
    sets: Sets = None,
    out: Out = None,
    *,
    overwrite: Overwrite = False,
) -> None:
    """How much faster do more ranks train?

    Strong scaling keeps the total batch, and each rank's share shrinks; weak scaling keeps each
    rank's share, and the batch grows. All worlds are alive at once and take turns. Efficiency is
    samples/s, against so many times those of the smallest world as there are more ranks.

    \b
    unipar scale configs/quickstart.yaml --world 1,2,4
    unipar scale configs/quickstart.yaml --world 1,2 --cell native/nothing,native/parameters
    """
    from unipar.verbs.scale import scale as scaled

    found = scaled(_read(file, sets, out=out), worlds=world, cells=cells or (), overwrite=overwrite)
    _say(found)


@app.command(epilog=EXITS)
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)],
    after: Annotated[
        Path | None, typer.Argument(metavar="[AFTER]", help="A later one: RUN is laid below it.", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Instead of report.html in it.")] = None,
) -> None:
    """The pages of a run folder: of a comparison, a scaling, a run.

    Each is one file with figures and tables, to be opened in a browser or sent on: memory, losses, time,
    config, versions. Each thing that lies there has its page, with links to the others. With two
    comparisons or two runs, what changed from the first to the second.

    \b
    unipar report runs/quickstart
    unipar report runs/before runs/after --out change.html
    """
    from unipar.verbs.report import reported

    typer.echo("\n".join(reported(run, after, out)))


@app.command(epilog=EXITS)
def verify(
    file: File,
    cells: Cells = None,
    world: Annotated[int | None, typer.Option("--world", metavar="N", min=2, help="Ranks in each cell.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="K", min=1, help="Optimizer steps; 10 without it.")
    ] = None,
    sets: Sets = None,
    out: Out = None,
    *,
    overwrite: Overwrite = False,
) -> None:
    """Do all cells give the numbers of one process, on this very task?

    Some steps in one process, in fp64 and as configured, and cut in several ways; then in every
    cell. Where one parts: the first step, module and parameter, and what kind of fault fits.
    Exit 0 when all that ran agree.

    \b
    unipar verify configs/char_gpt.yaml
    unipar verify configs/char_gpt.yaml --cells native/parameters --cells 'deepspeed/*' --world 4
    """
    source = _read(file, sets, out=out)
    from unipar.verbs.verify import verify as verified

    found = verified(source, cells=cells or (), world=world, steps=steps, overwrite=overwrite)
    _say(found)


@app.command(epilog=EXITS)
def check(
    file: File,
    cell: InCell = None,
    sets: Sets = None,
    out: Out = None,
    *,
    overwrite: Overwrite = False,
    deep: Annotated[bool, typer.Option("--deep", help="Import the task's file as well.")] = False,
) -> None:
    """Say whether FILE would train here.

    Answered from what is written, without torch.

    \b
    unipar check configs/char_gpt.yaml
    unipar check configs/char_gpt.yaml --backend native/parameters --set batch.micro=3
    """
    source = _read(file, sets, cell, out)
    from unipar.verbs.check import check as checked

    typer.echo(checked(source, deep=deep, overwrite=overwrite))


@app.command(epilog=EXITS)
def explain(
    file: File,
    cells: Annotated[
        list[str] | None,
        typer.Option(
            "--cell", metavar=CELL, callback=apart, help="What its library is told; deepspeed/* for all of one."
        ),
    ] = None,
    sets: Sets = None,
    *,
    compare: Annotated[bool, typer.Option("--compare", help="All cells of compare.cells.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Import the task and count what it is made of.")] = False,
    as_json: AsJson = False,
) -> None:
    """Every value, and where it came from.

    Then, for each cell, what its library will be told, and the dtype of each thing.

    \b
    unipar explain configs/char_gpt.yaml
    unipar explain configs/char_gpt.yaml --cell 'deepspeed/*' --deep
    unipar explain configs/char_gpt.yaml --set train.optimizer.lr=1e-3 --json
    """
    source = _read(file, sets)
    from unipar.verbs.explain import explain as explained

    found = explained(source, cells or (), compare=compare, deep=deep)
    if as_json:
        typer.echo(found.to_json())
    elif sys.stdout.isatty():
        found.draw()
    else:
        typer.echo(found.plain())


@app.command(epilog=EXITS)
def export(
    file: File,
    to: Annotated[
        str, typer.Option("--to", metavar="NAME", help="torchrun, deepspeed, accelerate, horovod.", show_default=False)
    ],
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Instead of ./CONFIG-NAME.")] = None,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """The same training as a script that needs unipar no more.

    Writes a folder: the loop as that library's users would write it, its own config, your task, and run.sh.
    It gives the losses that `unipar run` gives.

    \b
    unipar export configs/char_gpt.yaml --to torchrun --set parallel.data=2
    unipar export configs/char_gpt.yaml --to deepspeed --set parallel.shard=gradients --out zero2
    """
    source = _read(file, sets)
    from unipar.verbs.export import export as exported

    typer.echo(str(exported(source, to, out, overwrite=overwrite)))


@app.command("import", epilog=EXITS)
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="ds_config.json, accelerate.yaml.", show_default=False)],
    out: Annotated[Path | None, typer.Option("-o", "--out", metavar="FILE", help="Into a file instead.")] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Say what the file leaves open. Repeat it for more."),
    ] = None,
    world: Annotated[int | None, typer.Option("--world", metavar="N", help="The number of ranks.", min=1)] = None,
    leave: Annotated[
        list[str] | None, typer.Option("--leave", metavar="KEY", help="Go on without a key of the file.")
    ] = None,
    *,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
) -> None:
    """A config from a library's own.

    What cannot be carried is refused key by key, with the reason. An "auto" that the file does not settle is asked for.

    \b
    unipar import ds_config.json --set train.steps=1000 -o train.yaml
    unipar import accelerate.yaml --set train.epochs=3 --set batch.total=32 --set 'train.optimizer={lr: 3.0e-4}'
    """
    from unipar.verbs.importing import imported, write

    made = imported(file, sets or (), world=world, leave=leave or ())
    if out is None:
        typer.echo(made.text, nl=False)
        return
    write(made, out, overwrite=overwrite)
    typer.echo("\n".join([f"written: {out}", *(f"left out: {said}" for said in made.left_out)]))


@app.command(epilog=EXITS)
def schema(
    write: Annotated[Path | None, typer.Option("--write", metavar="FILE", help="Into a file instead.")] = None,
) -> None:
    """The config as JSON Schema, for editors.

    \b
    unipar schema
    unipar schema --write docs/config.schema.json
    """
    from unipar.verbs.schema import schema as made
    from unipar.verbs.schema import write_schema

    if write is None:
        typer.echo(made(), nl=False)
    else:
        write_schema(write)


@app.command(epilog=EXITS)
def backends(*, as_json: AsJson = False) -> None:
    """Who can train here, and in which cells.

    Of those that cannot, how to get them.

    \b
    unipar backends
    unipar backends --json
    """
    from unipar.verbs.backends import backends as listed

    listed(as_json=as_json)


@app.command(epilog=EXITS)
def doctor(*, as_json: AsJson = False) -> None:
    """What helps or hinders on this machine.

    A status and a remedy each; exit 1 where something fails.

    \b
    unipar doctor
    unipar doctor --json
    """
    from unipar.verbs.doctor import doctor as examined

    if not examined(as_json=as_json):
        raise typer.Exit(1)


@app.command(epilog=EXITS)
def install(
    name: Annotated[str, typer.Argument(metavar="BACKEND", help="As `unipar backends` calls it.", show_default=False)],
    *,
    force: Annotated[bool, typer.Option("--force", help="Build it anew, though it is there.")] = False,
) -> None:
    """Build what pip alone cannot install.

    \b
    unipar install horovod
    unipar install horovod --force
    """
    from unipar.verbs.install import install as installed

    typer.echo(installed(name, force=force))
