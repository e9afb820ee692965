"""Scripts with tensor and context parallelism that `unipar export` writes: they train as one process does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import Forks
from tests.support.split_scripts import MODELS, TASKS, TOLD, compare, exported, play, refused, require_clean, run
from unipar.config import config_source as source
from unipar.conversion.export import export_script
from unipar.errors import TaskError


@pytest.mark.parametrize(
    ("task", "parallel", "ranks"),
    [
        ("plain", {"tensor": 2}, 2),
        ("gpt", {"context": 2}, 2),
        pytest.param("llama", {"tensor": 2}, 2, marks=pytest.mark.sweep),
        pytest.param("gpt2", {"context": 2}, 2, marks=pytest.mark.sweep),
        pytest.param("whole", {"tensor": 2}, 2, marks=pytest.mark.sweep),
        pytest.param("dry", {"tensor": 2, "context": 2, "shard": "parameters"}, 4, marks=pytest.mark.sweep),
        pytest.param("wholeattention", {"tensor": 2, "context": 2}, 4, marks=pytest.mark.sweep),
        pytest.param("plain", {"tensor": 2, "pipeline": 2}, 4, marks=pytest.mark.sweep),
        pytest.param("gpt2", {"context": 2, "pipeline": 2}, 4, marks=pytest.mark.sweep),
        pytest.param("bert", {"context": 2, "pipeline": 2, "schedule": "gpipe"}, 4, marks=pytest.mark.sweep),
        pytest.param("llama", {"context": 2, "pipeline": 2, "shard": "parameters"}, 4, marks=pytest.mark.sweep),
        pytest.param("gpt", {"context": 2, "pipeline": 2, "data": 2, "shard": "optimizer"}, 8, marks=pytest.mark.sweep),
        pytest.param("dry", {"context": 2, "pipeline": 2, "tensor": 2}, 8, marks=pytest.mark.sweep),
    ],
)
def test_a_script_trains_as_one_process(
    task: str, parallel: dict[str, Any], ranks: int, tmp_path: Path, forks: Forks
) -> None:
    """Ragged texts with weights, and dropout in attention, in hidden states and in what is cut; unipar is hidden."""
    told = {**TOLD, "task": TASKS[task], "parallel": {"data": 1, **parallel}}
    play(told, ranks, tmp_path, forks)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "parallel", [{"schedule": "interleaved", "sequence": True, "shard": "optimizer"}, {"schedule": "zerobubble"}]
)
def test_parts_of_blocks_in_two_stages_of_a_rank(parallel: dict[str, Any], tmp_path: Path, forks: Forks) -> None:
    """The schedules of torch beside tensor, with hidden states cut along the sequence in each stage and whole ones."""
    told = {**TOLD, "task": TASKS["gpt"], "parallel": {"data": 1, "tensor": 2, "pipeline": 2, **parallel}}
    play({**told, "data": {"last_batch": "drop"}}, 4, tmp_path, forks)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("task", "parallel", "ranks"),
    [
        ("gpt", {"tensor": 2}, 2),
        ("gpt", {"context": 2}, 2),
        ("gpt", {"tensor": 4}, 4),
        ("gpt", {"tensor": 2, "data": 2, "shard": "parameters"}, 4),
        ("gpt2", {"tensor": 2, "data": 2}, 4),
        ("gpt2", {"tensor": 2, "context": 2, "shard": "parameters"}, 4),
        ("bert", {"tensor": 2, "data": 2, "shard": "optimizer"}, 4),
        ("bert", {"tensor": 2, "context": 2}, 4),
        ("llama", {"context": 2, "data": 2, "shard": "gradients"}, 4),
        ("gpt", {"tensor": 2, "pipeline": 2, "schedule": "gpipe"}, 4),
        ("gpt2", {"tensor": 2, "pipeline": 2, "shard": "optimizer"}, 4),
    ],
)
def test_a_script_runs_by_its_command(task: str, parallel: dict[str, Any], ranks: int, tmp_path: Path) -> None:
    """Started by torchrun, where unipar cannot be imported."""
    told = {**TOLD, "task": TASKS[task], "parallel": {"data": 1, **parallel}}
    script = exported(told, tmp_path)
    assert f"--nproc-per-node {ranks} " in (script / "README.md").read_text("utf-8")
    run(script, tmp_path)
    compare(script, told, tmp_path)


def test_the_tables_of_a_script(tmp_path: Path) -> None:
    """Cuts, numbers and arguments are literals that a person can read and change."""
    told = {**TOLD, "task": TASKS["gpt2"], "parallel": {"data": 1, "tensor": 2}}
    text = (
        export_script(source.load_given_config(told), "torchrun", tmp_path / "made").folder / "train.py"
    ).read_text()
    assert (
        """PLANS = [
    CutPlan(
        blocks=BLOCKS,
        columns={"attn.c_attn": (32, 32, 32), "mlp.c_fc": (128,)},
        rows={"attn.c_proj": (32,), "mlp.c_proj": (128,)},
        numbers=("attn.split_size",),
        attention=True,
    ),
]
"""
        in text
    )
    told = {**TOLD, "parallel": {"data": 1, "context": 2}}
    folder = export_script(source.load_given_config(told), "torchrun", tmp_path / "other").folder
    listed = "- `mesh_parts.py`: parts of a model over ranks, as tables say: blocks over `tensor`, sequences over"
    assert listed in (folder / "README.md").read_text("utf-8")
    text = (folder / "train.py").read_text("utf-8")
    assert (
        """HIDDEN = 0  # place or name of a block's hidden states among its arguments
# along which dimension the sequence goes in other arguments; None: it does not
ARGUMENTS: dict[int | str, int | None] = {"attention_mask": 2, "position_embeddings": 1, "position_ids": 1}
"""
        in text
    )


@pytest.mark.parametrize(
    ("task", "parallel", "clip", "device"),
    [
        ("plain", {"tensor": 2, "shard": "parameters"}, 0.5, "cpu"),
        ("plain", {"tensor": 2}, None, "cuda"),
        ("gpt2", {"tensor": 2, "context": 2, "shard": "optimizer"}, 0.5, "cuda"),
        ("gpt2", {"tensor": 2, "context": 2}, None, "cpu"),
        ("llama", {"context": 2}, 0.5, "cpu"),
    ],
)
def test_a_script_is_clean(
    task: str, parallel: dict[str, Any], clip: float | None, device: str, tmp_path: Path
) -> None:
    """Linter and formatter have nothing to say."""
    told = {**TOLD, "task": TASKS[task], "parallel": {"data": 1, **parallel}, "device": device}
    told["train"] = {**TOLD["train"], "clip": clip, "schedule": {"name": "cosine" if clip else "constant", "warmup": 1}}
    require_clean(told, tmp_path)


@pytest.mark.parametrize(
    ("shard", "clip", "axes"),
    [
        ("nothing", 0.5, {"tensor": 2}),
        ("optimizer", None, {"tensor": 2}),
        ("nothing", 0.5, {"context": 2}),
        ("optimizer", 0.5, {"tensor": 2, "context": 2}),
        ("nothing", None, {"tensor": 2, "context": 2}),
    ],
)
def test_a_script_of_a_pipeline_is_clean(shard: str, clip: float | None, axes: dict[str, int], tmp_path: Path) -> None:
    """Linter and formatter have nothing to say about further axes in a pipeline either."""
    told = {**TOLD, "task": TASKS["gpt2"], "parallel": {"data": 1, **axes, "pipeline": 2, "shard": shard}}
    told["train"] = {**TOLD["train"], "clip": clip}
    require_clean(told, tmp_path)


@pytest.mark.parametrize(
    ("kind", "parallel", "sentence"),
    [
        (
            "literal",
            {"tensor": 2},
            "native/nothing+tensor2: parallel.tensor: layers.0 asks for sizes of the whole (its part does not fit: "
            "shape '[2, 16, 4, 8]' is invalid for input of size 512, split_models.py:<b, t, heads, 8>), and "
            "of the whole numbers "
            "that its modules keep as attributes, dividing heads, width by 2 does not help: read them from such "
            "attributes (self.heads), or keep its matrices whole by the task's tensor(), or leave tensor out of the "
            "export",
        ),
        (
            "slopes",
            {"tensor": 2},
            "native/nothing+tensor2: parallel.tensor: layers.0 uses a whole tensor with one that is cut "
            "(scaled_dot_product_attention at split_models.py:<self.slopes * self>), so that a rank needs "
            "its part of it: keep "
            "layers.0.qkv whole by the task's tensor(), or leave tensor out of the export",
        ),
        (
            "functional",
            {"tensor": 2},
            "native/nothing+tensor2: parallel.tensor: layers.0 calls dropout at "
            "split_models.py:<F.dropout(hidden, 0.1> on what is cut, "
            "and a script cuts the masks of nn.Dropout modules only: use one there, or set its rate to 0",
        ),
        (
            "multihead",
            {"tensor": 2},
            "native/nothing+tensor2: parallel.tensor: layers.0.attention is a torch.nn.MultiheadAttention, whose "
            "forward is written for all heads: keep it whole (tensor() of the task returns {'*.attention': 'whole'}), "
            "or leave tensor out of the export",
        ),
        (
            "eager",
            {"context": 2},
            "parallel.context: layers.0 mixes positions outside of scaled_dot_product_attention, and a rank has 8 of "
            "16: compute attention by torch's scaled_dot_product_attention (transformers: "
            'attn_implementation="sdpa"), or split by parallel.tensor or parallel.pipeline instead',
        ),
        (
            "between",
            {"context": 2},
            "native/nothing+context2: parallel.context: dropout at split_models.py:<F.dropout(x, 0.1> lies "
            "between two blocks, where "
            "a script does not draw masks of whole sequences: move it into a block, or leave context out of the export",
        ),
        (
            "multihead",
            {"context": 2},
            "native/nothing+context2: parallel.context: layers.0.attention is a torch.nn.MultiheadAttention, whose "
            "inner attention a script cannot spread over 2 ranks: call F.scaled_dot_product_attention in the block, or "
            "leave context out of the export",
        ),
        (
            "plain",
            {"tensor": 2, "context": 2},
            "native/nothing+tensor2+context2: parallel.context: layers.0.drop drops elements of what tensor has cut, "
            "and a script does not cut its masks along the sequence as well: set its rate to 0, or leave one of both "
            "axes out of the export",
        ),
        (
            "plain",
            {"tensor": 3},
            "parallel.tensor: 3 would split nothing of this model (down: 3 does not divide its 32 outputs; out: 3 does "
            "not divide its 32 outputs; qkv: 3 does not divide the 32 outputs of one of its parts): leave tensor out, "
            "or name what it can split in the task's tensor(model)",
        ),
    ],
)
def test_refused(kind: str, parallel: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    """Each with its reason, and nothing is written; `<code>` stands for the number of that line."""
    task = {"use": f"{MODELS}:Kinds", "args": {"kind": kind}}
    lines = MODELS.read_text("utf-8").splitlines()
    expected = re.sub("<(.*?)>", lambda m: str(1 + next(i for i, line in enumerate(lines) if m[1] in line)), sentence)
    assert refused({**TOLD, "task": task, "parallel": {"data": 1, **parallel}}, tmp_path) == expected


def test_parts_that_compute_something_else_are_refused(tmp_path: Path) -> None:
    """A width that is both a size and a scale fits once it is divided, and is another model."""
    task = {"use": f"{MODELS}:Kinds", "args": {"kind": "scale"}}
    text = refused({**TOLD, "task": task, "parallel": {"data": 1, "tensor": 2}}, tmp_path)
    assert re.sub(r"off by \S+ of \S+\)", "off)", text) == (
        "native/nothing+tensor2: parallel.tensor: layers.0 in parts with heads, width divided by 2 puts out "
        "something else than the whole (off), so a script cannot cut it: keep its matrices whole by the "
        "task's tensor(), or leave tensor out of the export"
    )


def test_a_module_with_the_name_of_a_file_of_the_script(tmp_path: Path) -> None:
    """It would be written over, so it is refused."""
    (tmp_path / "own.py").write_text(f"{MODELS.read_text('utf-8')}\n\nimport mesh_parts\n", encoding="utf-8")
    (tmp_path / "mesh_parts.py").write_text("", encoding="utf-8")
    task = {"use": f"{tmp_path}/own.py:Kinds", "args": {"kind": "dry"}}
    with pytest.raises(TaskError) as e:
        export_script(
            source.load_given_config({**TOLD, "task": task, "parallel": {"data": 1, "tensor": 2}}),
            "torchrun",
            tmp_path / "made",
        )
    assert str(e.value) == ("Kinds imports mesh_parts.py, and a script has a file of that name itself: rename yours")
    assert not (tmp_path / "made").exists()
