"""Lines of a script that a draft takes over, and what they need."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

from unipar.observing.script_source import ScriptSource, TakenCode
from unipar.results.observed_recipe import CodePlace

SCRIPT = Path("/home/me/train.py")


def _loss(
    text: str, *, models: tuple[str, ...] = ("model",), others: tuple[str, ...] = (), micros: int = 1
) -> TakenCode:
    """Return what is taken for the loss of a script whose line with backward ends in `# here`."""
    source = dedent(text)
    line = next(i for i, words in enumerate(source.splitlines(), 1) if words.endswith("# here"))
    code = ScriptSource(SCRIPT, source).loss_at(line, models, others, accumulates=micros > 1)
    assert code is not None
    return code


def test_loss_in_a_loop() -> None:
    """What the loop binds is the batch; statements that only move it, and those of other variables, are left out."""
    code = _loss(
        """
        from torch.nn import functional as F
        from mine import metrics
        for epoch in range(3):
            for i, (x, y) in enumerate(loader):
                x, y = x.to(device), y.to(device)
                rate = metrics(i)
                out = ddp(x)
                loss = F.cross_entropy(out, y)
                loss.backward()  # here
        """,
        models=("ddp",),
    )
    assert code.lines == ["x, y = batch", "out = model(x)", "return F.cross_entropy(out, y)"]
    assert list(code.imports) == ["from torch.nn import functional as F"]
    assert (code.first, code.last, code.missing) == (8, 10, [])


def test_loss_under_autocast_and_accumulation() -> None:
    """Blocks are looked into, the division by the number of microbatches is left out, and the scaled loss is found."""
    code = _loss(
        """
        for batch in loader:
            with torch.autocast("cuda"):
                loss = model(**batch).loss
                loss = loss / 4
            scaler.scale(loss).backward()  # here
        """,
        micros=4,
    )
    assert code.lines == ["return model(**batch).loss"]


def test_loss_given_to_a_library() -> None:
    """`accelerator.backward(loss)` has the loss as its argument."""
    code = _loss("for x, y in loader:\n    acc.backward(loss_of(model, x, y) / 2)  # here\n", micros=2)
    assert code.lines == ["x, y = batch", "return loss_of(model, x, y)"]
    assert code.missing == ["loss_of"]


def test_loss_of_another_model() -> None:
    """A further model cannot stand in the loss."""
    code = _loss("for x in loader:\n    D(G(x)).mean().backward()  # here\n", models=("G",), others=("D",))
    assert code.missing == ["D"]


def test_batch_that_a_function_draws() -> None:
    """Variables that a function sets together are the batch, if no loop binds them."""
    code = _loss(
        """
        x, y = get_batch("train")
        for step in range(10):
            loss = model(x, y)
            x, y = get_batch("train")
            loss.backward()  # here
        """
    )
    assert code.lines == ["x, y = batch", "return model(x, y)"]


def test_loss_on_a_line_with_others() -> None:
    """Of several statements on the line the one that calls backward counts."""
    code = _loss("for x in data:\n    opt.zero_grad(); model(x).sum().backward(); opt.step()  # here\n")
    assert code.lines == ["x = batch", "return model(x).sum()"]


def test_arguments_of_functions_and_of_the_command() -> None:
    """An argument of the function is followed to its call, and one of the command is its value."""
    text = dedent(
        """
        import argparse
        from torch import nn
        def train(model, loader, criterion):
            for x, y in loader:
                criterion(model(x), y).backward()
        def main():
            args = argparse.ArgumentParser().parse_args()
            data = Points(args.n)
            criterion = nn.CrossEntropyLoss(label_smoothing=args.smooth)
            train(net, data, criterion)
        class Points: ...
        if __name__ == "__main__":
            main()
        """
    )
    callers = [CodePlace(file=str(SCRIPT), line=11, function="main")]
    source = ScriptSource(SCRIPT, text, {"args": {"n": 96, "smooth": 0.1}}, callers)
    assert source.can_be_imported
    code = source.loss_at(6, ["model"], accumulates=False)
    assert code is not None
    assert code.lines == [
        "criterion = nn.CrossEntropyLoss(label_smoothing=0.1)",
        "x, y = batch",
        "return criterion(model(x), y)",
    ]
    data = source.value_of("data", 11)
    assert data is not None
    assert (data.lines, list(data.imports)) == (["return Points(96)"], ["from train import Points"])


def test_what_the_command_says_is_not_known() -> None:
    """A variable that depends on what a user types is missing."""
    code = ScriptSource(SCRIPT, "args = parse_args()\ndata = load(args.path)\n").value_of("data", 2)
    assert code is not None
    assert code.missing == ["args", "load"]


def test_copied_definitions() -> None:
    """If an import would train, definitions are copied with their decorators, after what they need."""
    text = dedent(
        """
        from dataclasses import dataclass
        WIDTH = 4
        @dataclass
        class Settings:
            width: int = WIDTH
        class Net:
            def __init__(self, s: Settings): ...
        net = Net(Settings())
        net.train()
        """
    )
    source = ScriptSource(SCRIPT, text)
    assert not source.can_be_imported
    code = source.definition("Net")
    assert list(code.copied) == ["WIDTH", "Settings", "Net"]
    assert code.copied["WIDTH"] == "WIDTH = 4"
    assert code.copied["Settings"].startswith("@dataclass\nclass Settings:")
    assert (list(code.imports), code.missing) == (["from dataclasses import dataclass"], [])


def test_only_loader() -> None:
    """The dataset of the script's only loader is its first argument; of two loaders nobody knows which."""
    one = ScriptSource(SCRIPT, "import d\nloader = acc.prepare(DataLoader(d.load(), batch_size=4))\n")
    code = one.argument_of("DataLoader")
    assert code is not None
    assert code.lines == ["return d.load()"]
    two = ScriptSource(SCRIPT, "a = DataLoader(x)\nb = DataLoader(y)\n")
    assert two.argument_of("DataLoader") is None
