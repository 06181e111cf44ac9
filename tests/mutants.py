"""Changes the scheduler's core and the worker's mirror at random, and counts what the tests find: `make mutants`.

`python -m tests.mutants [NUMBER] [SEED] [LINES.json]`: a mutant is one small change, as `<` to `<=` or a statement left
out. It runs the tests that execute its line, the quickest first, and is killed by the first that fails or does not end.
Those that survive are printed, each for a person: a test is missing, or the change makes no difference.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
MUTATED = ("scheduler_svc/core", "worker_svc/mirror")
# In one process and quick: each mutant runs them.
TESTS = [
    "tests/scheduler/test_admission.py",
    "tests/scheduler/test_admitted_before.py",
    "tests/scheduler/test_adopted_blocks.py",
    "tests/scheduler/test_answers.py",
    "tests/scheduler/test_beam_search.py",
    "tests/scheduler/test_block_manager.py",
    "tests/scheduler/test_core_state_machine.py",
    "tests/scheduler/test_engine.py",
    "tests/scheduler/test_failures.py",
    "tests/scheduler/test_faults.py",
    "tests/scheduler/test_forgotten_tenants.py",
    "tests/scheduler/test_group_limits.py",
    "tests/scheduler/test_group_of_many.py",
    "tests/scheduler/test_integrity.py",
    "tests/scheduler/test_joined_workers.py",
    "tests/scheduler/test_live_requests.py",
    "tests/scheduler/test_placement.py",
    "tests/scheduler/test_policy.py",
    "tests/scheduler/test_pool.py",
    "tests/scheduler/test_pool_histories.py",
    "tests/scheduler/test_preemption.py",
    "tests/scheduler/test_prompt_logprobs.py",
    "tests/scheduler/test_resumed_outputs.py",
    "tests/scheduler/test_router.py",
    "tests/scheduler/test_row_filler.py",
    "tests/scheduler/test_scheduler.py",
    "tests/scheduler/test_sequence.py",
    "tests/scheduler/test_sharing.py",
    "tests/scheduler/test_stranded_groups.py",
    "tests/scheduler/test_time_limits.py",
    "tests/scheduler/test_trials.py",
    "tests/scheduler/test_waiting_queue.py",
    "tests/scheduler/test_wide_beams.py",
    "tests/scheduler/test_withheld_blocks.py",
    "tests/worker/test_bad_words.py",
    "tests/worker/test_cached_blocks.py",
    "tests/worker/test_logit_adjustments.py",
    "tests/worker/test_malformed_bytes.py",
    "tests/worker/test_row_samples.py",
    "tests/worker/test_sequence_states.py",
]
# Whatever takes long to import and changes with no mutant: once, and not for each.
IMPORTED = ["numpy", "torch", "hypothesis.strategies", "structlog", "grpc", "anyio.pytest_plugin", "pytest_asyncio"]
IMPORTED += ["pytest_timeout", "protos.inference_pb2_grpc", "protos.worker_pb2_grpc"]
CPU_S, WALL_S = 20, 120  # of one mutant; the second for what waits for ever
CALLS = 5000  # of a function in one test that are watched
CHOSEN_S = 4.0  # of tests that a mutant is shown, as long as they take without it
EXCHANGED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.Break: ast.Continue, ast.Continue: ast.Break,
}  # fmt: skip
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
Lines = dict[str, dict[str, set[int]]]  # of each test: by file, the lines that it executes


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Whatever runs and decides: no annotations, assertions, messages or numbers with a name."""
    for name, value in ast.iter_fields(tree):
        for node in value if isinstance(value, list) else [value]:
            is_skipped = isinstance(node, ast.Assert | ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom)
            is_skipped |= isinstance(node, ast.Assign | ast.AnnAssign) and _is_tuned(node)
            is_skipped |= isinstance(node, ast.keyword) and node.arg == "strict"  # asserts that lengths are equal
            if isinstance(node, ast.AST) and not is_skipped and name not in ("annotation", "returns", "decorator_list"):
                yield node
                yield from _code(node)


def _is_tuned(node: ast.Assign | ast.AnnAssign) -> bool:
    """Whether it gives a number its name in upper case: most of these tune, and any near it would do."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    is_named = all(isinstance(target, ast.Name) and target.id.isupper() for target in targets)
    parts = ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop
    return is_named and node.value is not None and all(isinstance(part, parts) for part in ast.walk(node.value))


def changes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(place in `_code`, what is done there), in an order that the source alone decides."""
    for place, node in enumerate(_code(tree)):
        match node:
            case ast.Compare(ops=[op]) | ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in EXCHANGED:
                yield place, "exchange"
            case ast.Break() | ast.Continue() | ast.Call(func=ast.Name(id="min" | "max" | "any" | "all")):
                yield place, "exchange"
            case ast.UnaryOp(op=ast.Not()):
                yield place, "drop not"
            case ast.Constant(value=int() as value):
                yield place, "negate" if isinstance(value, bool) else "add 1"
            case ast.If() | ast.While() | ast.IfExp():
                yield place, "negate test"
            case ast.Expr(value=ast.Call()) | ast.AugAssign():
                yield place, "leave out"


def mutated(tree: ast.Module, place: int, change: str) -> tuple[ast.Module, int, str]:
    """The changed copy, the line, and what stands there afterwards."""
    tree = copy.deepcopy(tree)
    node: Any = next(node for index, node in enumerate(_code(tree)) if index == place)
    match change, node:
        case "exchange", ast.Compare():
            node.ops = [EXCHANGED[type(node.ops[0])]()]
        case "exchange", ast.Call(func=ast.Name() as called):
            called.id = CALLED[called.id]
        case "exchange", ast.Break() | ast.Continue():
            node.__class__ = EXCHANGED[type(node)]
        case "exchange", _:
            node.op = EXCHANGED[type(node.op)]()
        case "drop not", _:
            node.operand = ast.copy_location(ast.UnaryOp(ast.Not(), node.operand), node)
        case "add 1", _:
            node.value += 1
        case "negate", _:
            node.value = not node.value
        case "negate test", _:
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        case "leave out", _:
            line = ast.unparse(node)
            fields = {name: getattr(node, name) for name in node._attributes}
            node.__class__, node.__dict__ = ast.Pass, fields
            return tree, node.lineno, f"without: {line}"
    return tree, node.lineno, f"{change}: {ast.unparse(node).splitlines()[0]}"


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree."""

    def __init__(self, file: str, tree: ast.Module) -> None:
        self._file, self._tree = file, tree
        self._name = file.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != self._name:
            return None
        return importlib.util.spec_from_loader(name, self, origin=str(ROOT / self._file))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, str(ROOT / self._file), "exec"), module.__dict__)


class _Watch:
    """Which lines each test executes, and its seconds."""

    def __init__(self) -> None:
        self.lines: Lines = {}
        self.seconds: dict[str, float] = {}
        self._now: dict[str, set[int]] = defaultdict(set)
        self._calls: Counter[CodeType] = Counter()

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if "/core/" not in path and "/mirror/" not in path:
            return None
        self._calls[frame.f_code] += 1
        return self._line if self._calls[frame.f_code] <= CALLS else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        self._now[frame.f_code.co_filename].add(frame.f_lineno)
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = defaultdict(set)
        self._calls.clear()
        started_s, num_failed = time.process_time(), item.session.testsfailed
        sys.settrace(self._enter)
        threading.settrace(self._enter)
        yield
        sys.settrace(None)
        threading.settrace(None)
        self.seconds[item.nodeid] = time.process_time() - started_s
        if item.session.testsfailed == num_failed:  # some look at their own stack
            self.lines[item.nodeid] = {file.removeprefix(f"{ROOT}/"): lines for file, lines in self._now.items()}


def _in_a_child(tests: list[str], change: tuple[str, ast.Module] | None, watch: Path | None = None) -> bool:
    """Whether the tests pass; a process that has not imported what is changed, but has what takes long to import."""
    child = os.fork()
    if child:
        deadline_s = time.monotonic() + WALL_S
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if watch is None and time.monotonic() > deadline_s:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return False
            time.sleep(0.02)
        return ended[1] == 0
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    plugins: list[object] = []
    if change is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
        sys.meta_path.insert(0, _Changed(*change))
    elif watch is not None:
        plugins.append(_Watch())
    try:
        status = int(
            pytest.main(
                [*(["-x"] if watch is None else []), "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], plugins
            )
        )
        if watch is not None:
            found = plugins[0]
            assert isinstance(found, _Watch)
            lines = {t: {f: sorted(ls) for f, ls in fs.items()} for t, fs in found.lines.items()}
            status = not lines
            watch.write_text(json.dumps({"lines": lines, "seconds": found.seconds}))
    except BaseException:
        status = 1
    os._exit(min(status, 1))


def _chosen(seen: dict[str, Any], file: str, line: int) -> list[str]:
    """Of the tests that execute the line the quickest, for together some seconds; always at least one."""
    tests = [test for test, lines in seen["lines"].items() if line in lines.get(file, ())]
    tests = tests or [test for test, lines in seen["lines"].items() if file in lines]  # run at import, as a default is
    chosen: list[str] = []
    seconds = 0.0
    for test in sorted(tests, key=seen["seconds"].__getitem__):
        if chosen and seconds + seen["seconds"][test] > CHOSEN_S:
            break
        chosen.append(test)
        seconds += seen["seconds"][test]
    return chosen


def main(number: int = 200, seed: int = 0, kept: str = "") -> None:
    """Prints every survivor, then the share that was killed."""
    os.chdir(ROOT)
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each would look through it again
    folder = ROOT / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    path = Path(kept) if kept else folder / "lines-of-tests.json"
    if not (kept and path.exists()) and not _in_a_child(TESTS, None, path):
        raise SystemExit("no test passes without any change")
    seen = json.loads(path.read_text())
    trees = {
        str(file.relative_to(ROOT)): ast.parse(file.read_text(encoding="utf-8"))
        for mutated_folder in MUTATED
        for file in sorted((ROOT / mutated_folder).rglob("*.py"))
    }
    all_of_them = [(file, *change) for file, tree in trees.items() for change in changes(tree)]
    chosen = random.Random(seed).sample(all_of_them, min(number, len(all_of_them)))
    num_killed = 0
    for file, place, change in chosen:
        tree, line, what = mutated(trees[file], place, change)
        tests = _chosen(seen, file, line)
        if tests and not _in_a_child(tests, (file, tree)):
            num_killed += 1
        else:
            print(f"{file}:{line} survives {len(tests)} tests: {what}", flush=True)
    print(f"{num_killed} of {len(chosen)} killed ({num_killed / len(chosen):.1%}), seed {seed}, of {len(all_of_them)}")


if __name__ == "__main__":
    number, seed, kept = (*sys.argv[1:], *("200", "0", "")[len(sys.argv) - 1 :])
    main(int(number), int(seed), kept)
