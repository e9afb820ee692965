"""Variables that a task's code reads: found in its code, sent to ranks, refused if they cannot be sent."""

from __future__ import annotations

import importlib
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from transformers.models.gpt2.configuration_gpt2 import GPT2Config

from unipar.errors import TaskError
from unipar.task.importing import imported_files
from unipar.task.reference import TaskRef
from unipar.task.script_values import collect_script_values, decode_value, encode_value

HEAD = """
import argparse, contextlib, dataclasses, enum, functools, math
from pathlib import Path
import torch, unipar

class Base(unipar.Task):
    def model(self): ...
    def data(self): ...
    def loss(self, model, batch): ...
"""

READS = f"""{HEAD}
WIDTH, DEPTH, UNREAD, BESIDE, IN_BLOCK, WRAPPED, NESTED = 1, 2, 3, 4, 5, 6, 7
model = 8

def helper(): return DEPTH

@torch.no_grad()
def wrapped(): return WRAPPED

class Net:
    size = WIDTH
    def build(self): return BESIDE

class T(Base):
    rate = 0.1
    def model(self): return WIDTH, helper(), Net, math.pi
    @functools.cached_property
    def size(self): return wrapped()
    def loss(self, model, batch): return [NESTED for _ in model.model]
    def unrelated(self): self.UNREAD = 1
"""


class Pair(NamedTuple):
    """Two values."""

    first: int
    second: list[int]


class Raising:
    """Object whose attributes are not there yet."""

    def __getattr__(self, name: str) -> None:
        raise RuntimeError(name)

    def __call__(self) -> None:
        """Return None."""


class Settings(BaseModel):
    """Settings as pydantic has them."""

    width: int


Imported = Callable[..., ModuleType]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Imported]:
    """Import a text as the module `of_script`."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text: str) -> ModuleType:
        (tmp_path / "of_script.py").write_text(text, "utf-8")
        importlib.invalidate_caches()
        return importlib.import_module("of_script")

    yield write
    sys.modules.pop("of_script", None)
    imported_files.clear()


def _load_as_rank(ref: TaskRef) -> Any:
    """Return the task as a process loads it that has imported nothing of the script."""
    sys.modules.pop("of_script", None)
    return TaskRef.from_json(json.loads(json.dumps(ref.to_json()))).load()


def test_what_code_reads(imported: Imported) -> None:
    """Methods, functions, classes and wrapped functions of the user's files are followed; attributes are no reads."""
    found = {name: value for _, name, value in collect_script_values([imported(READS).T])}
    assert found == {
        "WIDTH": 1,
        "DEPTH": 2,
        "BESIDE": 4,
        "WRAPPED": 6,
        "NESTED": 7,
        "Net.size": 1,
        "T.rate": 0.1,
    }


def test_a_typed_dict_that_code_reads(imported: Imported) -> None:
    """A TypedDict takes part in no instance check, and is followed like any class."""
    module = imported(f"""{HEAD}
import typing
LIMIT = 2

class Row(typing.TypedDict):
    width: int

class T(Base):
    def model(self): return Row(width=LIMIT)
""")
    assert [(name, value) for _, name, value in collect_script_values([module.T])] == [("LIMIT", 2)]


VALUES = f"""{HEAD}
class Kind(enum.Enum):
    SMALL = 1
    LARGE = 2

@dataclasses.dataclass
class Sizes:
    width: int = 4
    where: Path = Path("here")

class Plain:
    depth = 1
    def __init__(self): self.items = [1]

CFG, ARGS, KIND, SIZES, PLAIN, WEIGHTS, ACT, ABSENT = {{}}, None, Kind.SMALL, Sizes(), Plain(), None, math.sin, 1
del ABSENT

class T(Base):
    width = 4
    def model(self): return CFG, ARGS, KIND, SIZES, PLAIN, WEIGHTS, ACT, ABSENT, self.width
"""


def test_what_was_set_travels(imported: Imported) -> None:
    """Values of plain data, of objects that are no more than their attributes, and small tensors arrive in a rank."""
    script: Any = imported(VALUES)
    script.CFG["width"], script.CFG["of"] = 64, (1, {2.5, None})
    script.ARGS = __import__("argparse").Namespace(width=64)
    script.KIND, script.SIZES = script.Kind.LARGE, script.Sizes(64, Path("there"))
    script.PLAIN.items.append(2)
    script.WEIGHTS, script.ACT, script.ABSENT = torch.tensor([1.0, float("nan")]), np.cos, torch.float16
    script.T.width = 64
    ref = TaskRef.of(script.T, None, {})
    cfg, args, kind, sizes, plain, weights, act, absent, width = _load_as_rank(ref).model()
    here: Any = sys.modules["of_script"]
    assert here is not script
    assert (cfg, args.width, kind, width) == ({"width": 64, "of": (1, {2.5, None})}, 64, here.Kind.LARGE, 64)
    assert (sizes, type(sizes), plain.items, type(plain)) == (
        here.Sizes(64, Path("there")),
        here.Sizes,
        [1, 2],
        here.Plain,
    )
    assert weights.nan_to_num(7).tolist() == [1.0, 7.0]
    assert (act, absent) == (np.cos, torch.float16)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 0.5, "text", [1, (2, "3")], {"a": {1: frozenset({1, 2})}}, Path("a/b")),
        *(torch.bfloat16, torch.device("cpu"), torch.nn.GELU, json.dumps, np.float32(0.5)),
        *(SimpleNamespace(width=4), OrderedDict(b=1, a=2), Pair(1, [2]), Settings(width=4), GPT2Config(n_embd=8)),
    ],
)
def test_a_value_and_back(value: object) -> None:
    """A value comes back equal, and of the same type, through JSON."""
    back = decode_value(json.loads(json.dumps(encode_value(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value", [torch.ones(2, 3, dtype=torch.bfloat16).t(), torch.empty(0, 2), np.eye(3)[::2], np.array("x")]
)
def test_an_array_and_back(value: Any) -> None:
    """Tensors and arrays come back with dtype, shape and values."""
    back = decode_value(json.loads(json.dumps(encode_value(value))))
    assert (back.dtype, back.shape, back.tolist()) == (value.dtype, value.shape, value.tolist())


def test_what_cannot_be_sent() -> None:
    """Values that hold more than data are described, large ones by their size."""
    loop: list[Any] = [1]
    loop.append(loop)
    assert encode_value(json.JSONDecoder().decode) == {"opaque": "the function JSONDecoder.decode"}
    assert encode_value(loop) == {"list": [1, {"opaque": "a list"}]}
    assert encode_value(torch.nn.Linear(2, 2)) == {"opaque": "a Linear"}
    assert encode_value(torch.zeros(300, 300)) == {"opaque": "a tensor of torch.float32 [300, 300] on cpu"}
    assert encode_value(np.zeros(40_000)) == {"opaque": "an array of <f8 [40000]"}
    assert encode_value(Raising()) == {"opaque": "a Raising"}
    assert encode_value(list(range(20_000))) == {"opaque": "a large list"}


REFUSED = f"""{HEAD}
tokenizer = None
class T(Base):
    def loss(self, model, batch): return tokenizer, later
"""


def test_a_difference_that_cannot_be_sent(imported: Imported) -> None:
    """A rank names the variable and both values if the script has set one that cannot be sent."""
    script: Any = imported(REFUSED)
    script.tokenizer = torch.nn.Linear(2, 2)
    with pytest.raises(TaskError) as e:
        _load_as_rank(TaskRef.of(script.T, None, {}))
    assert str(e.value) == (
        "the task reads tokenizer of of_script, which is a Linear in the script, and None in its ranks, which import "
        'the file without its `if __name__ == "__main__"` block; such a value cannot be sent to them: set it above the '
        "block, or create it in the task's methods, from task.args"
    )
    script = imported(REFUSED)
    script.later = torch.nn.Linear(2, 2)
    with pytest.raises(
        TaskError, match=r"^the task reads later of of_script, which is a Linear in the script, and no "
    ):
        _load_as_rank(TaskRef.of(script.T, None, {}))


SAME = f"""{HEAD}
import logging, threading, random
log, lock, net, large = logging.getLogger("of"), threading.Lock(), torch.nn.Linear(2, 2), torch.randn(300, 300)
square, out, rng, drawn = (lambda x: x * x), open("/dev/null", "w"), random.Random(), random.random()
class T(Base):
    def loss(self, model, batch): return log, lock, net, large, square, out, rng, drawn
"""


@pytest.mark.filterwarnings("ignore:unclosed file")
def test_no_false_alarm(imported: Imported) -> None:
    """Values that each process makes for itself are no difference; a drawn number is the script's everywhere."""
    script: Any = imported(SAME)
    drawn = script.drawn
    assert _load_as_rank(TaskRef.of(script.T, None, {})).loss(None, None)[-1] == drawn
    script.out.close()
    sys.modules["of_script"].out.close()  # pyright: ignore[reportAttributeAccessIssue] - the text above has it


def test_a_token_stays_out_of_the_run_folder(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is the value of an environment variable is sent as the variable's name, alone and in a list."""
    monkeypatch.setenv("UNIPAR_TESTS_TOKEN", "hf_0123456789")
    script: Any = imported(VALUES)
    script.ARGS, script.CFG["of"], script.ABSENT = "hf_0123456789", ["hf_0123456789"], None
    ref = TaskRef.of(script.T, None, {})
    assert "hf_0123456789" not in json.dumps(ref.to_json())
    cfg, args, *_ = _load_as_rank(ref).model()
    assert (cfg["of"], args) == (["hf_0123456789"], "hf_0123456789")


def test_arguments_of_the_script(imported: Imported, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has the script's `sys.argv` while it imports the task's file, and later."""
    monkeypatch.setattr(sys, "argv", ["top.py", "--width", "16"])
    ref = TaskRef.of(imported(f"{HEAD}\nimport sys\nargv = sys.argv\nclass T(Base): ...").T, None, {})
    sys.argv = ["worker", "--rank=1"]
    _load_as_rank(ref)
    assert sys.modules["of_script"].argv == sys.argv == ["top.py", "--width", "16"]


def test_a_class_named_in_the_config(imported: Imported) -> None:
    """A script may change what it imports and leave the task's name to the config."""
    from unipar.config.config import TaskUse

    script: Any = imported(VALUES)
    script.T.width, script.ABSENT = 64, 1
    assert _load_as_rank(TaskRef.of(None, TaskUse(use="of_script:T"), {})).width == 64
