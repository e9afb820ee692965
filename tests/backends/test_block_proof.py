"""The mesh's proof block by block: what it finds, what it leaves out, and what rank 0 holds for it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override
from unipar_mesh.look_at_model import WholeModel, look_at_model, whole_gradients
from unipar_mesh.proof.proof_of_blocks import sketch_blocks
from unipar_mesh.proof.proof_of_model import refuse_difference

import unipar
from tests.support.stacked import Stacked
from tests.support.unsplit import Towers
from tests.support.world import ROOT
from unipar.backend import registry
from unipar.config import Config
from unipar.errors import TaskError, Unsupported

pytestmark = pytest.mark.forked


def losses(folder: Path, task: str, parallel: dict[str, Any], proof: str, **args: Any) -> list[float]:
    """Train a task of tests/support for two steps; return its losses."""
    config = {
        "task": {"use": f"{ROOT}/tests/support/{task}", "args": args},
        "device": "cpu",
        "parallel": {"data": 1, **parallel},
        "batch": {"total": 8, "micro": 4},
        "train": {"steps": 2, "optimizer": {"lr": 1e-2}},
        "data": {"last_batch": "drop"},
        "options": {"native": {"proof": proof}} if parallel else {},
        "log": {"every": 1},
        "out": str(folder / "-".join(["run", *parallel])),
    }
    return [loss for _, loss in unipar.launch(config, quiet=True).losses]


@pytest.mark.parametrize(
    "parallel",
    [
        {"tensor": 2},
        pytest.param({"tensor": 2, "data": 2, "shard": "parameters"}, marks=pytest.mark.sweep),
        pytest.param({"tensor": 2, "pipeline": 2}, marks=pytest.mark.sweep),
        pytest.param({"context": 2, "pipeline": 2}, marks=pytest.mark.sweep),
        pytest.param({"context": 2, "data": 2, "shard": "optimizer"}, marks=pytest.mark.sweep),
        pytest.param({"pipeline": 2, "schedule": "interleaved"}, marks=pytest.mark.sweep),
        pytest.param({"pipeline": 2, "schedule": "zerobubble", "data": 2}, marks=pytest.mark.sweep),
    ],
)
def test_a_right_split_is_proved(tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Blocks on any stage, in any part, with part of a sequence: nothing is refused, and nothing is left behind."""
    data = {"data": parallel.get("data", 1)}
    expected = losses(tmp_path, "stacked.py:Stacked", {}, "blocks") if data == {"data": 1} else None
    split = losses(tmp_path, "stacked.py:Stacked", parallel, "blocks")
    assert split == pytest.approx(expected or losses(tmp_path / "2", "stacked.py:Stacked", data, "whole"), abs=1e-6)


def test_a_cache_of_keys_and_a_mask(tmp_path: Path) -> None:
    """GPT-2 is planned with the cache as a block gets it, which is empty, and trained with and without padding."""
    expected = losses(tmp_path, "split_models.py:CachedGPT2", {}, "whole")
    split = losses(tmp_path, "split_models.py:CachedGPT2", {"tensor": 2}, "whole")
    assert split == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("parallel", "heads"),
    [
        ({"tensor": 2}, (2, 1)),
        pytest.param({"tensor": 2, "sequence": True}, (4, 2), marks=pytest.mark.sweep),
        pytest.param({"tensor": 2, "pipeline": 2}, (2, 1), marks=pytest.mark.sweep),
    ],
)
def test_batches_with_and_without_a_mask(tmp_path: Path, parallel: dict[str, Any], heads: tuple[int, int]) -> None:
    """With a mask Llama repeats its keys, of which a rank takes its heads then; without, torch does that."""
    args = dict(zip(("heads", "keys"), heads, strict=True))
    expected = losses(tmp_path, "split_models.py:SharedKeys", {}, "whole", **args)
    split = losses(tmp_path, "split_models.py:SharedKeys", parallel, "whole", **args)
    assert split == pytest.approx(expected, abs=1e-5)


def test_two_towers_in_a_pipeline(tmp_path: Path) -> None:
    """A cut within the second tower, which balance would choose, leaves the first one out: another cut is taken."""
    task = Towers()
    blocks = ["images.0", "images.2", "texts.0", "texts.2", "texts.4"]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return task.loss_across(task.features(model, batch))

    facts = look_at_model(task.model(), blocks, loss, task.data().tensors, 2)
    assert facts.cuts[1] in (1, 2)
    with pytest.raises(TaskError, match=r"only some of the blocks on each stage, and it fails with texts.2, texts.4"):
        look_at_model(task.model(), blocks, loss, task.data().tensors, 2, ["texts.2"])
    expected = losses(tmp_path, "unsplit.py:Towers", {}, "whole")
    assert losses(tmp_path, "unsplit.py:Towers", {"pipeline": 2}, "whole") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("dtype", "loss", "gradient", "refused"),
    [
        (torch.bfloat16, 2.001, 1.04, ""),
        (torch.bfloat16, 2.003, 1.04, "a loss of 2.003 for 2;"),
        (torch.bfloat16, 2.001, 1.07, "a loss of 2.001 for 2, and the gradient of w is off by 7.0e-02 of its length;"),
        (torch.float16, 2.001, 1.04, ""),
        (torch.float32, 2.001, 1.0, "a loss of 2.001 for 2;"),
        (torch.float32, 2.0, 1.04, "a loss of 2 for 2, and the gradient of w is off by 4.0e-02 of its length;"),
        (torch.float32, 2.00001, 1.0001, ""),
        (torch.float64, 2.0, 1.0001, ""),  # a loss that is a number of fp32 may have been computed in it
        (torch.float64, 2.1, 2.0, "a loss of 2.1 for 2, and the gradient of w is off by 1.0e+00 of its length;"),
    ],
)
def test_what_rounding_explains(dtype: torch.dtype, loss: float, gradient: float, refused: str) -> None:
    """A split model in bf16 may differ by 0.1 % of the loss and 5 % of a gradient, one in fp32 by far less."""
    whole, found = WholeModel(2.0, {"w": torch.tensor([1.0, 0.0])}), torch.tensor([[gradient, 0.0]])
    if not refused:
        refuse_difference(whole, loss, found, dtype, "tensor 2")
        return
    with pytest.raises(TaskError, match=re.escape(f"split as planned, the model is another: {refused} tensor 2. ")):
        refuse_difference(whole, loss, found, dtype, "tensor 2")


def test_a_gradient_that_is_only_rounding() -> None:
    """One of a millionth of the longest may be another one; twice one of a thousandth is refused."""
    longest = torch.tensor([1.0, 0.0])
    whole = WholeModel(2.0, {"w": longest, "x": torch.tensor([0.0, 7e-7])})
    refuse_difference(whole, 2.0, torch.tensor([[1.0, 0.0], [7e-7, 0.0]]), torch.float32, "tensor 2")
    whole = WholeModel(2.0, {"w": longest, "x": torch.tensor([1e-3, 0.0])})
    with pytest.raises(TaskError, match=re.escape("the gradient of x is off by 1.0e-01 of its length; tensor 2. ")):
        refuse_difference(whole, 2.0, torch.tensor([[1.0, 0.0], [2e-3, 0.0]]), torch.float32, "tensor 2")


@pytest.mark.parametrize(
    ("task", "parallel", "args", "sentence"),
    [
        pytest.param(
            "unsplit.py:Unsummed",
            {"tensor": 2},
            {"where": "leave"},
            r"split as planned, the model is another: a loss of [\d.]+ for [\d.]+, and in blocks.0, run by itself, the "
            r"output of blocks.0 is off by [\d.e-]+ of its length, and the gradient of blocks.0.\w+.\w+ is off by "
            r"[\d.e-]+ of its length; tensor 2. Leave one of the axes out, or say in the task's tensor\(model\) or",
            marks=pytest.mark.sweep,
        ),
        (
            "unsplit.py:Unsummed",
            {"tensor": 2},
            {"where": "enter"},
            r"split as planned, the model is another: in blocks.0, run by itself, the gradient of blocks.0.norm1.\w+ "
            r"is off by [\d.e-]+ of its length; tensor 2. Leave",
        ),
        pytest.param(
            "unsplit.py:Skipping",
            {"pipeline": 2},
            {"cuts": ["blocks.2"]},
            r"split as planned, the model is another: a loss of [\d.]+ for [\d.]+, while a block of each kind "
            r"\(blocks.0, blocks.2\) has the right output and gradients, so that what differs lies between blocks or "
            r"outside of them; pipeline 2, with stages that begin at blocks.2 \(a value that skips a block",
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["rows not added up", "columns not added up", "a skip across a cut"],
)
def test_a_wrong_split_is_refused(
    tmp_path: Path, task: str, parallel: dict[str, Any], args: dict[str, Any], sentence: str
) -> None:
    """A wrong output, a gradient alone, and what lies between blocks: by the block and the parameter."""
    with pytest.raises(TaskError, match=sentence):
        losses(tmp_path, task, parallel, "blocks", **args)


def test_parts_between_blocks_are_not_proved_by_blocks(tmp_path: Path) -> None:
    """Such a model is refused before any process starts."""
    sentence = (
        "options.native.proof: blocks is not available with parallel.sequence: true, where a block between others has "
        "a part of its input; take proof: whole, or leave sequence out"
    )
    with pytest.raises(Unsupported, match=re.escape(sentence)):
        losses(tmp_path, "stacked.py:Stacked", {"tensor": 2, "sequence": True}, "blocks")


@pytest.mark.sweep
def test_what_blocks_do_not_show(tmp_path: Path) -> None:
    """A gradient that is another behind the blocks, with the right loss, is refused by the whole proof only."""
    with pytest.raises(TaskError, match=r"and the gradient of [a-z0-9.]+ is off by 1.0e"):
        losses(tmp_path / "whole", "unsplit.py:Stray", {"tensor": 2}, "whole")
    assert len(losses(tmp_path / "blocks", "unsplit.py:Stray", {"tensor": 2}, "blocks")) == 2


def test_without_a_proof_the_log_says_so(tmp_path: Path) -> None:
    """One line on rank 0, and a wrong split trains."""
    assert len(losses(tmp_path, "unsplit.py:Unsummed", {"tensor": 2}, "off", where="leave")) == 2
    said = (
        "options.native.proof: off: nothing was compared before the first step, so it is not proved that the split "
        "model is the whole one; `unipar verify` compares whole steps\n"
    )
    logs = [(tmp_path / f"run-tensor/rank-{rank}.log").read_text("utf-8") for rank in (0, 1)]
    assert [log.count(said) for log in logs] == [1, 0]


@pytest.mark.parametrize(
    ("proof", "parameters", "said"),
    [
        (
            "whole",
            7_000_000_000,
            "whole: loss and all gradients against those of the whole model; rank 0 holds its weights and gradients, "
            "parameters x 8 bytes = 52 GiB of host memory, and the activations of one microbatch; "
            "options.native.proof: blocks needs gradients of one block at a time",
        ),
        (
            "blocks",
            None,
            "blocks: the loss, and outputs and gradients of a block of each kind, against those of the whole model; "
            "rank 0 holds its weights, parameters x 4 bytes of host memory, and gradients of one block at a time",
        ),
        ("off", None, "off: it is not proved before the first step that the split model is the whole one"),
    ],
)
def test_what_explain_says_of_it(proof: str, parameters: int | None, said: str) -> None:
    """The mode, and the memory of the host by which to choose one; the number where the model is known."""
    config = Config.model_validate({
        "task": {"use": "t.py:T"}, "batch": {"total": 4}, "train": {"steps": 1}, "parallel": {"tensor": 2},
        "options": {"native": {"proof": proof}},
    })  # fmt: skip
    assert registry.find_backend("native").native_config(config, parameters)["proof"] == said


@final
class _LiveBytes(TorchDispatchMode):
    """Counter of the bytes of tensors that operators have made and that still exist, and of the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self._known.add(_address(tensor.untyped_storage()))  # a view of it takes no memory
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _address(tensor.untyped_storage()) not in self._known:
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = _address(storage), storage.nbytes()
        self._known.add(key)
        self.now += size
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= size

        weakref.finalize(storage, gone)


def _address(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # pyright: ignore[reportPrivateUsage]


def most_bytes(run: Callable[[], object]) -> int:
    """Return the most bytes that tensors made by this function have at a time."""
    with _LiveBytes() as count:
        run()
    return count.most


def test_memory_of_rank_0() -> None:
    """The whole proof has all gradients at once; by blocks it has those of one block, of four here."""
    task = Stacked(width=64)
    model, batch = task.model(), next(iter(torch.utils.data.DataLoader(task.data(), batch_size=1)))
    parameters = sum(p.nbytes for p in model.parameters())
    block = sum(p.nbytes for p in model.get_submodule("blocks.0").parameters())
    assert (parameters, block) == (812_032, 199_936)
    whole = most_bytes(lambda: whole_gradients(model, task.loss, batch))
    blocks = most_bytes(lambda: sketch_blocks(model, task.loss, batch, ["blocks.0", "blocks.2"]))
    assert whole > parameters
    assert block < blocks < whole / 2


def test_stages_on_trial_have_no_gradients() -> None:
    """Which parameters a stage uses is read from its graph: no backward runs, and no activation is kept."""
    task = Stacked(width=64)
    model, batch = task.model(), next(iter(torch.utils.data.DataLoader(task.data(), batch_size=1)))
    names = [f"blocks.{i}" for i in range(4)]
    parameters = sum(p.nbytes for p in model.parameters())
    assert most_bytes(lambda: look_at_model(model, names, task.loss, batch, 2, ["blocks.2"])) < parameters / 4
