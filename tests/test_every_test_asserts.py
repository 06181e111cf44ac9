"""Every test can fail: it asserts, expects an exception, or calls a helper whose name says that it checks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CHECKS = ("check", "assert", "expect")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def _called(call: ast.Call) -> str:
    """The last name of what is called: `raises` of `pytest.raises`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _can_fail(test: Function) -> bool:
    names = {_called(node) for node in ast.walk(test) if isinstance(node, ast.Call)}
    return (
        any(isinstance(node, ast.Assert) for node in ast.walk(test))
        or bool(names & {"raises", "warns", "run_state_machine_as_test"})
        or any(name.lstrip("_").startswith(CHECKS) for name in names)
    )


def silent_tests(source: str) -> list[str]:
    tests = (node for node in ast.walk(ast.parse(source)) if isinstance(node, Function))
    return [test.name for test in tests if test.name.startswith("test_") and not _can_fail(test)]


def test_every_test_asserts() -> None:
    silent = {
        str(file.relative_to(TESTS)): names
        for file in sorted(TESTS.rglob("test_*.py"))
        if (names := silent_tests(file.read_text(encoding="utf-8")))
    }
    assert silent == {}


@pytest.mark.parametrize(
    ("body", "can_fail"),
    [
        ("assert x", True),
        ("with pytest.raises(ValueError): x()", True),
        ("_check_sums(x)", True),
        ("case.assert_same()", True),
        ("run(x)", False),
        ("x.unchecked()", False),
        ("'assert in a text'", False),
    ],
)
def test_what_counts_as_an_assertion(body: str, can_fail: bool) -> None:
    for definition in ("def", "async def"):
        assert silent_tests(f"{definition} test_it(x):\n    {body}") == ([] if can_fail else ["test_it"])
