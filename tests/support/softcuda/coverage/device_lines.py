"""Device lines of unipar: statements, and arms of conditional expressions, that are for a device other than the CPU.

They are: what a test of the device lets run on a device alone; statements that name torch's interface to devices, or
functions of ours that no CPU has; handlers of errors that no CPU raises; and modules that are for devices as a whole.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, final

ROOT = Path(__file__).parents[4]
FOLDERS = ("unipar", "backends")
ON_ANY_MACHINE = (
    *(
        "unipar/planning/",
        "unipar/training/fake_run/",
        "unipar/comparison/make_plan.py",
        "unipar/comparison/make_forecast.py",
    ),
    *(
        "unipar/conversion/",
        "unipar/results/",
        "unipar/report/",
        "unipar/jobs/",
        "unipar/config/job_system.py",
    ),
    *("/prediction/", "/predict.py", "/prediction.py", "/import_config.py", "/import_sections/", "/export.py"),
)
"""Parts of the names of modules that plan or write for a device on any machine: they are not searched."""

TESTS = ("has_own_memory", "copies_on_a_stream", "keeps_allocator_history", "_has_cuda")
"""Functions that are true on a device alone; variables that are set to such a test are found."""

OBJECTS = ("_pinned", "scaler")
"""Variables that are None on the CPU."""

SETTINGS = {"device": "cpu", "offload": "none"}
"""Words of a comparison, and the value that they have on the CPU, where another `model.offload` is refused."""

DEVICE_TYPES = ("cuda", "xpu", "npu", "hpu", "mps")

INTERFACES = (
    *("torch.cuda", "torch.accelerator", "torch.mps", "torch.get_device_module", "torch.Stream", "torch.version.hip"),
    *("torch.backends.cuda", "torch.backends.cudnn", "torch.backends.mps", "pynvml"),
)
FUNCTIONS = (
    *("_module", "select_device", "device_name", "device_uuid", "bytes_allocated", "bytes_reserved"),
    *("peak_bytes_allocated", "peak_bytes_reserved", "forget_peaks", "free_and_total_bytes", "available_bytes"),
    *("limit_memory", "release_unused_memory", "stream_number", "allocator_segments", "_copy_stream", "_copy"),
    *("_check_own_devices", "_begin_profile", "_end_profile", "seconds_not_hidden"),
    *("count_chosen_gpus", "ask_torch", "_ask_torch", "_has_cuda_driver", "has_flash"),
)
"""Functions that no CPU needs: they are device lines as a whole, and so is each statement that calls one."""

ERRORS = ("DeviceUnusable", "DriverSilent", "NVMLError", "OutOfMemoryError")
DEVICE_MODULES = (
    "unipar/distributed/gpus.py",
    "unipar/engines/loss_scale.py",
    "unipar/memory/sources/allocator_history.py",
    "unipar/memory/sources/nvml.py",
    "unipar/memory/sources/pinned.py",
)

Node: TypeAlias = ast.stmt | ast.expr
Position: TypeAlias = tuple[int, int]


def position_of(node: Node) -> Position:
    """Return where a node is: line and column."""
    return node.lineno, node.col_offset


@dataclass
class DeviceLines:
    """Device lines of one module, as nodes of its tree."""

    statements: list[ast.stmt] = field(default_factory=list[ast.stmt])
    arms: list[ast.expr] = field(default_factory=list[ast.expr])

    @property
    def nodes(self) -> list[Node]:
        """All of them in their order."""
        return sorted((*self.statements, *self.arms), key=position_of)


def source_files() -> list[Path]:
    """Return the modules that are searched, relative to the root."""
    files = (file.relative_to(ROOT) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    return sorted(file for file in files if is_searched(str(file)))


def is_searched(file: str) -> bool:
    """Return whether a file is a module of unipar that runs where training does."""
    return file.split("/")[0] in FOLDERS and not any(part in file for part in ON_ANY_MACHINE)


def find_device_lines(tree: ast.Module, file: str) -> DeviceLines:
    """Return the device lines of a module."""
    return _Search(tree, whole=file in DEVICE_MODULES).found


@final
class _Search:
    def __init__(self, tree: ast.Module, *, whole: bool) -> None:
        self.found = DeviceLines()
        self._whole = whole
        self._on_device, self._on_cpu = set[str](TESTS), set[str]()
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if self.needs_device(node.value, result=True):
                    self._on_device.add(_last_name(target))
                elif self.needs_device(node.value, result=False):
                    self._on_cpu.add(_last_name(target))
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import))
        self._has_torch = any(name.name.partition(".")[0] == "torch" for node in imports for name in node.names)
        self._block(tree.body, on_device=False, in_function=False)

    def needs_device(self, test: ast.expr, *, result: bool) -> bool:
        """Return whether a test has this result on a device alone."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.needs_device(operand, result=not result)
            case ast.BoolOp(op=op, values=values):
                one_is_enough = isinstance(op, ast.And) == result
                return (any if one_is_enough else all)(self.needs_device(v, result=result) for v in values)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot() as op], comparators=[ast.Constant(value=None)]):
                return _last_name(left) in OBJECTS and result == isinstance(op, ast.IsNot)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                what = ast.unparse(right if _strings(left) else left)
                return result in _results_on_a_device(what, op, _strings(right) or _strings(left))
            case ast.Call(func=ast.Attribute(attr="startswith", value=value), args=[word]):
                return result in _results_on_a_device(ast.unparse(value), ast.Eq(), _strings(word))
            case ast.Call(func=function):
                return self.needs_device(function, result=result)
            case ast.Name() | ast.Attribute():
                return _last_name(test) in (self._on_device if result else self._on_cpu)
            case _:
                return False

    def _block(self, statements: Sequence[ast.stmt], *, on_device: bool, in_function: bool) -> None:
        for statement in statements:
            self._statement(statement, on_device=on_device, in_function=in_function)
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                on_device = on_device or self.needs_device(statement.test, result=False)

    def _statement(self, statement: ast.stmt, *, on_device: bool, in_function: bool) -> None:
        if isinstance(statement, ast.ClassDef):
            self._block(statement.body, on_device=on_device, in_function=in_function)
            return
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            there = on_device or self._whole or statement.name in FUNCTIONS
            self._block(statement.body, on_device=there, in_function=True)
            return
        own = [node for node in ast.iter_child_nodes(statement) if isinstance(node, ast.expr | ast.withitem)]
        if in_function and not _is_text(statement) and (on_device or any(self._names_interface(e) for e in own)):
            self.found.statements.append(statement)
        elif in_function:
            for expression in own:
                self._arms(expression)
        if isinstance(statement, ast.If):
            for body, result in ((statement.body, True), (statement.orelse, False)):
                there = on_device or self.needs_device(statement.test, result=result)
                self._block(body, on_device=there, in_function=in_function)
            return
        for body in _bodies(statement):
            self._block(body, on_device=on_device, in_function=in_function)
        for handler in getattr(statement, "handlers", ()):
            there = on_device or (handler.type is not None and any(e in ast.unparse(handler.type) for e in ERRORS))
            self._block(handler.body, on_device=there, in_function=in_function)

    def _arms(self, node: ast.AST) -> None:
        for arm, here in self._children(node):
            if here and isinstance(arm, ast.expr):
                self.found.arms.append(arm)
            else:
                self._arms(arm)

    def _children(self, node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
        """Yield each child of an expression, and whether it runs on a device alone."""
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                yield test, False
                yield body, self.needs_device(test, result=True)
                yield orelse, self.needs_device(test, result=False)
            case ast.BoolOp(op=op, values=values):
                there = False
                for value in values:
                    yield value, there
                    there = there or self.needs_device(value, result=isinstance(op, ast.And))
            case _:
                for child in ast.iter_child_nodes(node):
                    yield child, False

    def _names_interface(self, node: ast.AST) -> bool:
        """Return whether an expression names torch's interface to devices, outside arms for a device."""
        if isinstance(node, ast.Attribute) and self._has_torch and ast.unparse(node).startswith(INTERFACES):
            return True
        if isinstance(node, ast.Call) and _last_name(node.func) in (*FUNCTIONS, "pin_memory", "record_stream"):
            return True
        return any(not there and self._names_interface(child) for child, there in self._children(node))


def _results_on_a_device(what: str, op: ast.cmpop, values: Sequence[str]) -> set[bool]:
    """Return the results that a comparison with these values has on a device alone."""
    equal = not isinstance(op, ast.NotEq | ast.NotIn)
    if any(word in what and value in values for word, value in SETTINGS.items()):
        return {not equal}
    refused = ("precision" in what and values == ["fp16"]) or values == ["offload_policy"]  # where there is no device
    return {equal} if refused or any(value.partition(":")[0] in DEVICE_TYPES for value in values) else set()


def _strings(node: ast.expr) -> list[str]:
    nodes = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return [n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _leaves(body: Sequence[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        if body := getattr(statement, name, None):
            yield body
    for case in getattr(statement, "cases", ()):
        yield case.body
