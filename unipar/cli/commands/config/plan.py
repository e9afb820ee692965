"""`unipar plan`."""

from __future__ import annotations

import atexit
import gc
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unipar.cli.commands.options import (
    STRATEGIES_METAVAR,
    DetailsOption,
    JsonOption,
    SetOption,
    StrategiesOption,
    quote_files,
    read_config_file,
    split_at_commas,
)
from unipar.errors import ConfigError, Unsupported
from unipar.utils.text import did_you_mean, parse_bytes

if TYPE_CHECKING:
    from unipar.planning.plan import Plan
    from unipar.prediction.request import PlannedDevice

MACHINE_FILE = Path("machine.yaml")
"""Name of the file of a calibration, unless another is given."""


def plan(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE...", help="The config, and files that change keys of it.", show_default=False),
    ] = None,
    strategies: StrategiesOption = None,
    world: Annotated[
        str | None,
        typer.Option(
            "--world", metavar="N,N,...", help="Numbers of ranks, such as 1,8,64; this machine need not have them."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="Memory of a rank, such as 80GiB; by default that of the machine."
        ),
    ] = None,
    headroom: Annotated[
        str, typer.Option("--headroom", metavar="SHARE", help="Fraction of that memory to keep free.")
    ] = "5%",
    machine: Annotated[
        str | None,
        typer.Option("--machine", metavar="PRESET|FILE", help="For seconds and rates: h100-sxm, or a machine's file."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cpu|cuda", help="Plan for this device, whether this machine has it or not."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", metavar=STRATEGIES_METAVAR, callback=split_at_commas, help="Never recommend these strategies."
        ),
    ] = None,
    why: Annotated[
        str | None, typer.Option("--why", metavar="STRATEGY", help="Explain this strategy's peak by its tensors.")
    ] = None,
    sets: SetOption = None,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="File that --pick or --calibrate writes."),
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="With --why: every tensor.")] = False,
    pick: Annotated[
        bool, typer.Option("--pick", help="Write the recommended config, by default as FILE-picked.yaml.")
    ] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, and write machine.yaml for --machine.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is written.")] = False,
    details: DetailsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Predict the memory and speed of each strategy, without starting a process or allocating the model.

    The task's model and loss run on tensors without memory; what each backend holds and sends beside them is computed.
    The first line recommends a strategy: among those that fit the fastest, then the simplest. The table has the peak of
    each rank; with --memory or --machine, whether it fits, and the largest microbatch that does, with the same total
    batch; with --machine, seconds and rates. --details prints the peak by category and phase.

    \b
    unipar plan configs/char_gpt.yaml --world 1,2,8 --memory 80GiB
    unipar plan configs/char_gpt.yaml --strategy 'native/*' --world 64 --machine h100-sxm --set batch.total=512
    unipar plan configs/char_gpt.yaml --world 2 --why native/parameters
    unipar plan configs/char_gpt.yaml --world 8 --machine h100-sxm --pick
    unipar plan --calibrate
    """
    if calibrate:
        _calibrate(files, out or MACHINE_FILE, overwrite=overwrite)
        return
    if not files:
        raise ConfigError("plan: name a config: unipar plan FILE; without one there is only `unipar plan --calibrate`")
    if out is not None and not pick:
        raise ConfigError(f"-o {out}: only --pick and --calibrate write a file")
    source = read_config_file(files, sets)
    from unipar.comparison.make_plan import plan as plan_strategies

    atexit.register(gc.freeze)  # else Python collects what was traced when it exits, which takes seconds
    picked = out or files[0].with_name(f"{source.name}-picked.yaml")
    worlds = [read_ranks(word) for word in (world or "").split(",") if word]
    with _say_that_it_plans():
        planned = plan_strategies(
            source,
            strategies=[why] if why is not None else strategies or (),
            worlds=worlds,
            memory=None if memory is None else read_size(memory),
            headroom=read_share(headroom),
            machine=machine,
            device=None if device is None else read_device(device),
            exclude=exclude or (),
            pick=picked if pick else None,
            overwrite=overwrite,
        )
    if as_json:
        typer.echo(planned.as_json())
    elif why is not None:
        typer.echo(planned.why(why, every=every))
    else:
        width = shutil.get_terminal_size().columns
        typer.echo(planned.table(width) if details else planned.screen(width, _next_steps(planned)))
    if pick:
        typer.echo(f"written: {picked}; unipar run {picked}", err=as_json)
    raise typer.Exit(0 if any(not row.refusal for row in planned.rows) else Unsupported.code)


def _next_steps(planned: Plan) -> list[str]:
    """Return options to add to the same command next."""
    chosen = [each.row for each in planned.recommendations if each.row is not None]
    steps: list[str] = []
    if chosen:
        one = "" if len(planned.recommendations) == 1 else f" --world {chosen[-1].ranks}"
        steps.append(f"the same with{one} --pick writes the recommended config")
        steps.append(f"the same with --why {chosen[-1].strategy} explains its peak by its tensors")
    return [*steps, "the same with --details prints bytes by category and explains all figures"]


def _say_that_it_plans() -> AbstractContextManager[object]:
    """Return a context in which a terminal says what it waits for: a large model takes ten seconds and more."""
    if not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status("planning; Ctrl-C ends it")


def _calibrate(files: Sequence[Path] | None, out: Path, *, overwrite: bool) -> None:
    if files:
        raise ConfigError(
            f"plan --calibrate measures this machine, and needs no config; leave {quote_files(files)} out"
        )
    from unipar.calibration.calibrate import calibrate, check_machine_file, write_machine_file

    def tell(text: str) -> None:
        typer.echo(text, err=True)

    check_machine_file(out, overwrite=overwrite)
    write_machine_file(calibrate(tell, name=out.stem), out, overwrite=overwrite)
    typer.echo(f"written: {out}; unipar plan FILE --machine {out}")


def read_size(text: str) -> int:
    """Return a number of bytes from words such as 80GiB; raise ConfigError if they are none."""
    try:
        return int(parse_bytes(text))
    except ValueError as e:
        raise ConfigError(f"--memory {text}: {e}") from None


def read_share(text: str) -> float:
    """Return a share from words such as 5%; raise ConfigError if they are none."""
    from unipar.config.sections.size import parse_fraction

    try:
        share = parse_fraction(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share < 1.0:
        raise ConfigError(f"--headroom {text}: a share is from 0% to less than 100%: 5%, or 0.05")
    return share


def read_ranks(text: str) -> int:
    """Return a number of ranks; raise ConfigError if it is none."""
    if not text.strip().isdigit() or int(text) < 1:
        raise ConfigError(f"--world: {text!r} is no number of ranks; say for example --world 1,8,64")
    return int(text)


def read_device(text: str) -> PlannedDevice:
    """Return the kind of device; raise ConfigError if it is none."""
    if text == "cpu" or text == "cuda":
        return text
    suggested = "; did you mean 'cuda'?" if text.lower() == "gpu" else did_you_mean(text.lower(), ("cpu", "cuda"))
    raise ConfigError(f"--device {text}: plan for cpu or cuda{suggested}")
