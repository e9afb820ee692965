"""A step on tensors without memory: what it allocates, when, and what it cannot do."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.short_text import short_text
from unipar.config.config_source import load_given_config
from unipar.errors import TaskError
from unipar.prediction.timeline import PredictedParameter
from unipar.training.fake_run.step_recorder import StepRecorder
from unipar.training.fake_run.trace_task import TracedTask, trace_task

CHARS = short_text()

TASK = """
import torch
from torch import nn
from unipar import Task

class Small(Task):
    def model(self):
        {model}
    def data(self):
        return torch.utils.data.TensorDataset(torch.zeros(64, 4))
    def loss(self, model, batch):
        x, = batch
        {loss}
"""


def traced(
    task: dict[str, Any], micro: int = 2, recompute: str = "none", device: str = "cpu", **train: Any
) -> TracedTask:
    config = {"task": task, "batch": {"total": 8}, "device": device, "train": {"steps": 1, **train}}
    return trace_task(load_given_config({**config, "model": {"recompute": recompute}}).config, micro)


@pytest.fixture(scope="module")
def once() -> TracedTask:
    """A step of the small GPT."""
    return traced(CHARS)


@pytest.fixture(scope="module")
def again() -> TracedTask:
    """A step whose blocks are computed again in backward."""
    return traced(CHARS, recompute="blocks")


def small(tmp_path: Path, loss: str, model: str = "return nn.Linear(4, 4)") -> dict[str, Any]:
    (tmp_path / "small.py").write_text(TASK.format(model=model, loss=loss), "utf-8")
    return {"use": f"{tmp_path}/small.py:Small"}


def test_a_step_of_a_small_gpt(once: TracedTask) -> None:
    """Its parameters by block, a moment for each block's way in and out, and a gradient of every parameter."""
    timeline = once.timeline
    assert once.parameters == sum(p.numel for p in timeline.parameters)
    assert timeline.blocks == ("layers.0", "layers.1")
    assert (
        PredictedParameter("layers.1.mlp.0.weight", (64, 16), 4, True, 1, (4, 4), 0, viewed=True) in timeline.parameters
    )
    gradients = [m.parameter for m in timeline.moments if m.what == "gradient"]
    assert sorted(gradients) == list(range(len(timeline.parameters)))
    of_blocks = ("begin", "reach", "enter", "finish", "leave")
    ways = [(m.phase, m.what, m.block) for m in timeline.moments if m.what in of_blocks]
    assert ways == [
        ("forward", "begin", -1),
        *(("forward", what, 0) for what in ("reach", "enter", "finish", "leave")),
        *(("forward", what, 1) for what in ("reach", "enter", "finish", "leave")),
        *(("backward", what, -1) for what in ("begin", "reach", "enter")),
        *(("backward", what, 1) for what in ("reach", "enter", "finish", "leave")),
        *(("backward", what, 0) for what in ("reach", "enter", "finish", "leave")),
        ("backward", "finish", -1),
        ("update", "begin", -1),
        ("steady", "begin", -1),
    ]


def test_what_a_microbatch_of_any_size_allocates(once: TracedTask) -> None:
    """From two sizes; a third allocates what they lead to expect. Gradients do not grow, activations do."""
    assert once.even
    gradients = [b for b in once.activations.blocks if b.becomes_gradient]
    assert sum(b.size(9) for b in gradients) == sum(p.size for p in once.timeline.parameters)
    third = traced(CHARS, micro=9).activations
    assert once.activations.levels(9).tolist() == third.levels(9).tolist()
    assert once.activations.flops == (0.0, third.flops[1])


def test_recomputed_blocks_keep_less(once: TracedTask, again: TracedTask) -> None:
    """Most of what a block computes is not there any more when backward begins."""

    def kept(found: TracedTask) -> int:
        begin = next(n for n, m in found.activations.moments if (m.phase, m.what) == ("backward", "begin"))
        return int(found.activations.levels(2)[begin])

    assert kept(again) < kept(once) / 2
    assert [(p.name, p.size) for p in again.timeline.parameters] == [(p.name, p.size) for p in once.timeline.parameters]
    assert [p.name for p in again.timeline.parameters if p.viewed] == ["token.weight"]  # the head is in no block
    matrices = [p for p in again.timeline.parameters if p.name.startswith("layers.1.") and len(p.shape) == 2]
    assert [p.name for p in matrices if p.viewed_again] == [
        *("layers.1.qkv.weight", "layers.1.out.weight", "layers.1.mlp.0.weight"),
    ]  # the last one is used at once


def test_autocast_makes_copies(once: TracedTask) -> None:
    """Of weights, in bf16."""
    mixed = traced(CHARS, precision="bf16-mixed")
    copies = [b.operation for b in mixed.activations.blocks if b.operation == "_to_copy.default"]
    assert len(copies) > len([b for b in once.activations.blocks if b.operation == "_to_copy.default"]) + 8


@pytest.mark.parametrize(("device", "product"), [("cpu", "mm.default"), ("cuda", "_scaled_mm.default")])
def test_products_in_fp8(once: TracedTask, device: str, product: str) -> None:
    """Three for each layer, by what multiplies on the device, of bytes; they count as the same without fp8."""
    found = traced(CHARS, device=device, precision="fp8")
    layers = [b.where for b in found.activations.blocks if b.operation == product and b.where.startswith("layers.")]
    assert layers == [f"layers.{block}.{layer}" for block in (0, 1) for layer in ("qkv", "out", "mlp.0", "mlp.2")]
    assert found.activations.flops == once.activations.flops
    assert not [p.name for p in found.timeline.parameters if p.element_size != 4]


@pytest.mark.parametrize(
    ("loss", "model", "sentence"),
    [
        ("return model(x).sum() * (1.0 if x.sum().item() > 0 else 2.0)", "return nn.Linear(4, 4)",
         "plan: loss() needs the values of a tensor (aten._local_scalar_dense.default), and a plan computes without "
         "values: keep such numbers in Python, or choose by shapes"),
        ("return (model(x).relu() if len(x) > 2 else model(x)).sum()", "return nn.Linear(4, 4)",
         "plan: microbatches of 2 and 4 samples run different operations, so that their memory cannot be known in"),
        ("return model[0](model[0](x)).sum()", "return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))",
         "plan: the loss runs the block 0 more than once, and a plan knows blocks that run once: name other blocks"),
        ("return model['a'](x).sum()", "return {'a': nn.Linear(4, 4), 'b': nn.Linear(4, 4)}",
         "plan: model() returned several parts (a, b), and a plan has one model: measure it (unipar compare)"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(tmp_path: Path, loss: str, model: str, sentence: str) -> None:
    """The model is refused with the operation, and what to do."""
    with pytest.raises(TaskError, match=re.escape(sentence)):
        traced(small(tmp_path, loss, model))


@pytest.mark.parametrize(
    ("model", "parameters", "allocated"),
    [
        ("return nn.Linear(4, int(torch.full((), 3.0).item()))", 15, 0),
        ("x = nn.Linear(4, 3); return nn.Sequential(x, nn.Linear(3, 1 + int(x.bias.abs().max().item())))", 19, 76),
    ],
)
def test_a_model_that_needs_values(tmp_path: Path, model: str, parameters: int, allocated: int) -> None:
    """The plan is that of the model with values; told are the bytes of those parameters that had to have them."""
    found = traced(small(tmp_path, "return model(x).sum()", model))
    assert (found.parameters, found.allocated) == (parameters, allocated)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (
            "torch.zeros(p.shape[0], 2)",
            "plan: the optimizer's 'rows' has the shape (4, 2) for a parameter of (4, 4); a",
        ),
        ("torch.tensor(p.sum().item())", "plan: the optimizer's step needs the values of a tensor"),
    ],
)
def test_an_optimizer_with_other_states_is_refused(tmp_path: Path, value: str, sentence: str) -> None:
    """Those that are as large as their parameter are known."""
    task = small(tmp_path, "return model(x).sum()")
    own = f"""
    def optimizer(self, groups):
        class Rows(torch.optim.SGD):
            def step(self):
                for p in self.param_groups[0]["params"]:
                    self.state[p]["rows"] = {value}
        return Rows(groups, lr=1e-3)
"""
    (tmp_path / "small.py").write_text((tmp_path / "small.py").read_text("utf-8") + own, "utf-8")
    with pytest.raises(TaskError, match=re.escape(sentence)):
        traced(task)


def test_little_data(tmp_path: Path) -> None:
    """Microbatches of fewer samples are traced; of fewer than three there is no plan."""
    task = small(tmp_path, "return model(x).relu().sum()")
    few, many = traced(task, micro=48).activations, traced(task, micro=2).activations
    assert few.levels(7).tolist() == many.levels(7).tolist()
    (tmp_path / "few").mkdir()
    rest = small(tmp_path / "few", "return model(x).sum()")
    file = tmp_path / "few" / "small.py"
    file.write_text(file.read_text("utf-8").replace("torch.zeros(64, 4)", "torch.zeros(2, 4)"), "utf-8")
    with pytest.raises(TaskError, match=re.escape("plan: data() has 2 samples, and a plan needs 3")):
        traced(rest)


def test_modes_stay_as_they_are(tmp_path: Path) -> None:
    """A frozen teacher that is in evaluation mode drops nothing."""
    model = "made = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)); made[1].eval(); return made"
    operations = {b.operation for b in traced(small(tmp_path, "return model(x).sum()", model)).activations.blocks}
    assert not any("dropout" in one or "bernoulli" in one for one in operations)


def test_what_was_frozen_before_stays_frozen() -> None:
    """Python's collector passes over what a process had frozen, as it did before; where nothing was, nothing is."""
    gc.freeze()
    before = gc.get_freeze_count()
    traced(CHARS)
    assert gc.get_freeze_count() >= before
    gc.unfreeze()
    try:
        traced(CHARS)
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_operations_of_a_step(once: TracedTask, again: TracedTask) -> None:
    """Products of matrices and attention, three times what forward does; what is recomputed counts apart."""
    width, context, layers, characters = 16, 8, 2, 96
    products = 2 * context * (layers * 12 * width**2 + width * characters)
    attention = layers * 2 * 2 * context**2 * width
    each = once.activations.flops[1]
    assert each == 3 * (products + attention)
    assert once.activations.recomputed == (0.0, 0.0)
    more = again.activations
    assert more.flops[1] - more.recomputed[1] == each
    assert more.recomputed[1] > 0.5 * each / 3
    assert 60 < once.activations.operators < 100  # kernels, not views or questions to tensors


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_operations_that_torch_takes_apart(tmp_path: Path, mode: str) -> None:
    """A product of a teacher counts its operations, also where torch would not take it apart."""
    loss = f"with torch.{mode}(): t = nn.functional.linear(x.view(-1, 2, 2), torch.ones(2, 2))\n"
    task = small(tmp_path, f"{loss}        return (model(x) - t.clone().flatten(1)).sum()")
    assert traced(task).activations.flops == (0.0, 2 * 2 * 2 * 2 + 2 * (2 * 4 * 4))


def test_units_of_weight_and_a_checkpoint(tmp_path: Path, once: TracedTask) -> None:
    """What the task's weight counts in a sample; bytes of parameters and AdamW's two states with its steps."""
    task = small(tmp_path, "return model(x).sum()")
    (tmp_path / "small.py").write_text(
        (tmp_path / "small.py").read_text("utf-8")
        + "\n    def weight(self, batch):\n        return batch[0].numel()\n",
        "utf-8",
    )
    found = trace_task(load_given_config({"task": task, "batch": {"total": 8}, "train": {"steps": 1}}).config, 2)
    assert found.units == 4.0
    assert found.checkpoint == (3 * 20 * 4 + 2 * 4, 0)
    assert once.units is None


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("    def data(self):\n        print('reading')\n        return 1 / 0\n", "data() raised ZeroDivisionError: "),
        ("    def loss(self, model, batch):\n        return batch['x']\n", "loss() raised TypeError: "),
        ("    def model(self):\n        return undefined\n", "model() raised NameError: "),
    ],
)
def test_errors_of_the_tasks_code(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: str, sentence: str) -> None:
    """They are sentences with the file and the line; what it prints goes to stderr."""
    task = small(tmp_path, "return model(x).sum()")
    (tmp_path / "small.py").write_text((tmp_path / "small.py").read_text("utf-8") + "\n" + more, "utf-8")
    lines = (tmp_path / "small.py").read_text("utf-8").splitlines()
    with pytest.raises(TaskError) as caught:
        traced(task)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).endswith(f"({tmp_path}/small.py, line {len(lines)})")
    assert capsys.readouterr().out == ""


def test_a_shape_without_memory_is_no_allocation() -> None:
    """A tensor on the meta device, and views of it, have none in a training either."""
    mode, recorder = FakeTensorMode(), StepRecorder([])
    with mode, recorder:
        recorder.begin("forward")
        shape = torch.empty(1000, 1000, device="meta").view(-1)
        made = torch.zeros(10)
    assert (shape.shape, made.shape) == ((1_000_000,), (10,))
    assert [(block.size, block.operation) for block in recorder.blocks] == [(40, "zeros.default")]
