"""The import rules: who may know whom. Held by reading the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("octavo", "scheduler_svc", "worker_svc", "kernels", "protos")
SERVICES = {"scheduler_svc", "worker_svc", "kernels"}
# Of `octavo`, what a service may import. None of it knows a service.
SHARED = {
    "octavo.cache",
    "octavo.shared.command_line",
    "octavo.shared.connection_shares",
    "octavo.shared.connections",
    "octavo.shared.cores",
    "octavo.shared.end_with_parent",
    "octavo.shared.log",
    "octavo.models.errors",
    "octavo.models.fetch",
    "octavo.models.gguf_convert",
    "octavo.models.hub_cache",
    "octavo.models.safetensors_stream",
    "octavo.models.sentencepiece_tokenizer",
    "octavo.models.tekken_tokenizer",
    "octavo.shared.options",
    "octavo.shared.ports",
    "octavo.shared.rpc",
    "octavo.sampling_params",
}
CORE = ("sequence*", "block_*", "policy*", "scheduler.py")  # the scheduler's decisions: no sockets, no loop, no clock


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str  # absolute, with the imported name where that may be a module: `octavo.shared.log` for `from octavo import log`
    deferred: bool  # runs only when a function is called
    typing_only: bool  # under `if TYPE_CHECKING:`

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"

    def of(self, *names: str) -> bool:
        """Whether this is one of `names`, or inside one."""
        return any(self.module == name or self.module.startswith(name + ".") for name in names)


def imports_of(path: Path) -> Iterator[Import]:
    """Every import in the Python files of a folder, or in one file."""
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        yield from _walk(ast.parse(file.read_text(encoding="utf-8")), file, deferred=False, typing_only=False)


def _walk(node: ast.AST, file: Path, deferred: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            modules = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            package = list(file.relative_to(ROOT).parent.parts)
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            modules = [f"{module}.{alias.name}" for alias in child.names]
        else:
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            is_guard = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            yield from _walk(child, file, deferred or is_function, typing_only or is_guard)
            continue
        for module in modules:
            yield Import(file, child.lineno, module, deferred, typing_only)


def offending(path: str, *names: str) -> list[str]:
    return [str(found) for found in imports_of(ROOT / path) if found.of(*names)]


def test_the_scheduler_service_knows_no_device_code() -> None:
    assert offending("scheduler_svc", "torch", "triton", "numba", "kernels", "worker_svc") == []


def test_the_worker_service_does_not_know_the_scheduler() -> None:
    assert offending("worker_svc", "scheduler_svc") == []


def test_services_take_only_the_shared_modules_from_octavo() -> None:
    found = [each for service in SERVICES for each in imports_of(ROOT / service) if each.of("octavo")]
    assert [str(each) for each in found if each.module != "octavo" and not each.of(*SHARED)] == []


def test_shared_modules_import_no_service() -> None:
    files = [name.replace(".", "/") + ".py" for name in SHARED]
    assert [found for file in files for found in offending(file, *SERVICES)] == []


def test_kernels_import_torch_and_triton_alone() -> None:
    """Beside the standard library and each other. The compiled CPU kernels also import numba and what it is made of."""
    for found in imports_of(ROOT / "kernels"):
        on_cpu = (ROOT / "kernels" / "cpu") in found.file.parents
        allowed = {
            "torch",
            "triton",
            "kernels",
            *(("numba", "numpy", "llvmlite") if on_cpu else ()),
        } | sys.stdlib_module_names
        assert found.module.partition(".")[0] in allowed, str(found)


def test_importing_the_kernels_package_imports_nothing() -> None:
    found = imports_of(ROOT / "kernels" / "__init__.py")
    assert [str(each) for each in found if not each.of("__future__")] == []


def test_octavo_imports_a_service_only_inside_the_function_that_needs_it() -> None:
    found = [each for each in imports_of(ROOT / "octavo") if each.of(*SERVICES)]
    assert [str(each) for each in found if not (each.deferred or each.typing_only)] == []


def test_transformers_is_imported_nowhere_at_import_time() -> None:
    """Its import alone takes seconds: it is a fallback, and functions that need it import it."""
    found = [each for package in PACKAGES for each in imports_of(ROOT / package) if each.of("transformers")]
    assert [str(each) for each in found if not (each.deferred or each.typing_only)] == []


def test_the_scheduler_core_knows_neither_grpc_nor_a_loop_nor_a_clock() -> None:
    files = {file for pattern in CORE for file in (ROOT / "scheduler_svc").glob(pattern)}
    found = [each for file in files for each in imports_of(file)]
    assert found, "the patterns match no file"
    assert [str(each) for each in found if each.of("grpc", "asyncio", "time", "datetime", "threading")] == []


def test_protos_import_only_protobuf_and_grpc() -> None:
    allowed = {"google", "grpc", "protos"} | sys.stdlib_module_names
    assert [str(each) for each in imports_of(ROOT / "protos") if each.module.partition(".")[0] not in allowed] == []


def test_a_command_line_is_read_before_anything_slow_is_imported() -> None:
    program = "import sys, scheduler_svc.config, worker_svc.config; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    loaded = {name.partition(".")[0] for name in ended.stdout.split()}
    assert "scheduler_svc" in loaded
    assert not loaded & {"torch", "numpy", "tokenizers", "grpc", "google", "structlog", "huggingface_hub", "asyncio"}


def test_the_scheduler_loads_nothing_that_fetches_models() -> None:
    assert offending("scheduler_svc", "huggingface_hub") == []
    program = "import sys, scheduler_svc.server, octavo.commands.scheduler; print('huggingface_hub' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "False", ended.stderr


@pytest.mark.parametrize("package", ["scheduler_svc", "octavo"])
def test_everything_imports_where_torch_triton_and_numba_are_absent(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
for absent in ("torch", "triton", "numba", "transformers"):
    sys.modules[absent] = None
import {package}
for module in pkgutil.walk_packages({package}.__path__, "{package}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("{package}.")]))
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) >= 5
