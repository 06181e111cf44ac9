"""The import rules: who may know whom. Held by reading the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("octavo", "scheduler_svc", "worker_svc", "gateway_svc", "kernels", "protos")
SERVICES = {"scheduler_svc", "worker_svc", "gateway_svc", "kernels"}
# Of `octavo`, what a service may import. None of it knows a service.
SHARED = {
    "octavo.shared",
    "octavo.sampling_params",
    *(f"octavo.models.{name}" for name in ("errors", "fetch", "gguf_convert", "hub_cache", "safetensors_stream")),
    *(f"octavo.models.{name}" for name in ("sentencepiece_tokenizer", "tekken_tokenizer")),
}
# And what the gateway may, which is a client: all of a request's way over the wire, and nothing of what users import.
OF_CLIENTS = {"octavo.shared", *(f"octavo.{name}" for name in ("client", "errors", "retrying", "sampling_params"))}
# The rooms of each service, lowest first: a module imports from its own and from those before it.
ROOMS = {
    "scheduler_svc": [
        "errors",
        "vital_parts",
        "limits",
        "tracing",
        "core",
        "leases",
        "routing",
        "flight",
        "engine",
        "text",
        "models",
        "output",
        "requests",
        "workers",
        "config",
        "serving",
        "stopping",
        "api",
        "frontends",
        "shards",
        "server",
        "frontend_process",
    ],
    "worker_svc": [
        "errors",
        "config",
        "mirror",
        "host",
        "parallel",
        "models",
        "adapters",
        "tokenizers",
        "cache",
        "sampling",
        "steps",
        "service",
        "follower",
        "server",
    ],
    "gateway_svc": ["errors", "config", "requests", "answers", "upstream", "live", "page", "http", "server"],
    "kernels": ["int8_weight", "quantized_weight", "e4m3_weight", "oracles", "gpu", "cpu", "select", "bench"],
}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    module: str  # absolute, with the imported name where that may be a module: as in `from octavo import llm`
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
        yield from _imports_of_file(file)


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def _imports_of_file(file: Path) -> tuple[Import, ...]:
    return tuple(_walk(_parsed(file), file, deferred=False, typing_only=False))


def _walk(node: ast.AST, file: Path, deferred: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # most of a tree, and no import in it
            continue
        if isinstance(child, ast.Import):
            modules = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            package = list(file.relative_to(ROOT).parent.parts)
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            modules = [f"{module}.{alias.name}" for alias in child.names]
        else:
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            is_guard = isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")
            yield from _walk(child, file, deferred or is_function, typing_only or is_guard)
            continue
        for module in modules:
            yield Import(file, child.lineno, module, deferred, typing_only)


def offending(path: str, *names: str) -> list[str]:
    return [str(found) for found in imports_of(ROOT / path) if found.of(*names)]


def test_the_scheduler_service_knows_no_device_code() -> None:
    assert offending("scheduler_svc", "torch", "triton", "kernels", "worker_svc", "gateway_svc") == []


def test_the_worker_service_does_not_know_the_scheduler() -> None:
    assert offending("worker_svc", "scheduler_svc", "gateway_svc") == []


def test_the_gateway_knows_the_public_services_alone() -> None:
    others = SERVICES - {"gateway_svc"}
    assert offending("gateway_svc", *others, "protos.worker_pb2", "protos.frontend_pb2", "torch", "numpy") == []


def test_services_take_only_the_shared_modules_from_octavo() -> None:
    for service in SERVICES:
        allowed = OF_CLIENTS if service == "gateway_svc" else SHARED
        found = [each for each in imports_of(ROOT / service) if each.of("octavo")]
        assert [str(each) for each in found if each.module != "octavo" and not each.of(*allowed)] == []


def test_shared_modules_import_no_service() -> None:
    files = [name.replace(".", "/") for name in SHARED]
    paths = [file if (ROOT / file).is_dir() else f"{file}.py" for file in files]
    assert [found for path in paths for found in offending(path, *SERVICES)] == []


def test_the_cellar_knows_nothing_of_the_rest_of_octavo() -> None:
    found = [each for each in imports_of(ROOT / "octavo" / "shared") if each.of("octavo")]
    assert [str(each) for each in found if not each.of("octavo.shared")] == []


@pytest.mark.parametrize("package", ROOMS)
def test_nobody_imports_upwards(package: str) -> None:
    order = {room: height for height, room in enumerate(ROOMS[package])}
    here = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert here - {"__init__", "__main__"} == order.keys(), "each file and folder has its place in the order"
    upwards = []
    for each in imports_of(ROOT / package):
        room = each.file.relative_to(ROOT / package).parts[0].removesuffix(".py")
        if each.of(package) and room != "__init__":
            other = each.module.split(".")[1]
            upwards += [str(each)] if order[other] > order[room] else []
    assert upwards == []


def test_no_imports_go_in_a_circle() -> None:
    """Not even those that only a type checker sees, or a function when it is called."""
    files = {_name(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    edges = {name: {_existing(each.module, files) for each in imports_of(file)} for name, file in files.items()}
    waits: TopologicalSorter[str] = TopologicalSorter(
        {name: {other for other in others if other is not None and other != name} for name, others in edges.items()}
    )
    try:
        waits.prepare()
        circle = []
    except CycleError as error:
        circle = error.args[1]
    assert circle == []


def _name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _existing(module: str, files: dict[str, Path]) -> str | None:
    """The module that is meant: the name behind the last dot may be something within it."""
    return next((name for name in (module, module.rpartition(".")[0]) if name in files), None)


def test_every_folder_says_in_two_sentences_what_it_holds() -> None:
    for package in (*SERVICES, "octavo"):
        for folder in {file.parent for file in (ROOT / package).rglob("*.py")}:
            docstring = ast.get_docstring(_parsed(folder / "__init__.py"))
            assert docstring and docstring.count(".") >= 2, f"{folder}: what belongs there, and what does not"


def test_kernels_import_torch_numpy_and_triton_alone() -> None:
    """Beside the standard library and each other."""
    allowed = {"torch", "numpy", "triton", "kernels"} | sys.stdlib_module_names
    for found in imports_of(ROOT / "kernels"):
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


def test_opentelemetry_is_imported_where_spans_are_exported_alone() -> None:
    """And that file by nobody before tracing is on."""
    found = [each for package in PACKAGES for each in imports_of(ROOT / package)]
    theirs = {each.file.relative_to(ROOT).as_posix() for each in found if each.of("opentelemetry")}
    assert theirs == {"octavo/shared/tracing/otlp.py"}
    assert all(each.deferred for each in found if each.of("octavo.shared.tracing.otlp"))


def test_the_scheduler_core_knows_neither_grpc_nor_a_loop_nor_a_clock() -> None:
    found = list(imports_of(ROOT / "scheduler_svc" / "core"))
    assert [str(each) for each in found if each.of("grpc", "asyncio", "time", "datetime", "threading")] == []


def test_strings_that_name_modules_name_what_is_there() -> None:
    """As `monkeypatch.setattr`, `import_module` and `python -m` take them, alone or within a program's text.

    Of what is behind a module's name the first part must be in the module's own text: a definition, or an import.
    """
    lost = []
    for file in sorted(path for path in ROOT.glob("[!.]*/**/*.py") if not path.match("protos/*_pb2*")):
        for line, name in _named(file):
            if not name.startswith(NO_MODULES) and not _is_there(name):
                lost.append(f"{file.relative_to(ROOT)}:{line} names {name}")
    for file in (ROOT / "Makefile", ROOT / "Dockerfile", ROOT / ".ci" / "run", *ROOT.glob("compose*.yaml")):
        for found in re.finditer(r"python3? -m ([\w.]+)", file.read_text(encoding="utf-8")):
            if _NAMES.fullmatch(found[1]) and not _is_there(found[1]):
                lost.append(f"{file.relative_to(ROOT)} names {found[1]}")
    assert lost == []


_NAMES = re.compile(rf"(?<![\w./-])({'|'.join((*PACKAGES, 'benchmarks', 'docs', 'tests'))})(\.\w+)+")
# What looks like a module and is none: the public proto packages, a file, and what a test makes.
NO_MODULES = ("octavo.v1", "octavo.yaml", "octavo.sentencepiece", "kernels.gpu.rows.squared_relu")


def _named(file: Path) -> Iterator[tuple[int, str]]:
    """Names in strings that are no docstrings, each with its line; of files where not only imports name modules."""
    lines = (line.lstrip() for line in file.read_text(encoding="utf-8").splitlines() if _NAMES.search(line))
    if all(line.startswith(("from ", "import ")) for line in lines):
        return  # nine in ten: to parse a file takes more than all else
    tree = _parsed(file)
    docstrings: set[int] = set()
    for node in ast.walk(tree):  # from the outside to the inside
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.body and isinstance(node.body[0], ast.Expr):
                docstrings.add(id(node.body[0].value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from ((node.lineno, found[0]) for found in _NAMES.finditer(node.value))


@cache
def _is_there(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        if path.with_suffix(".py").is_file() or path.is_dir():
            break
    if count == len(parts):
        return True
    text = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return text.is_file() and parts[count] in _bound(_parsed(text))


def _bound(tree: ast.Module) -> set[str]:
    """Names that a module binds anywhere in its text."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
    return names


def test_protos_import_only_protobuf_and_grpc() -> None:
    allowed = {"google", "grpc", "protos"} | sys.stdlib_module_names
    assert [str(each) for each in imports_of(ROOT / "protos") if each.module.partition(".")[0] not in allowed] == []


def test_a_command_line_is_read_before_anything_slow_is_imported() -> None:
    program = "import sys, scheduler_svc.config, worker_svc.config, gateway_svc.config; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    loaded = {name.partition(".")[0] for name in ended.stdout.split()}
    assert "scheduler_svc" in loaded
    assert not loaded & {
        "torch",
        "numpy",
        "tokenizers",
        "grpc",
        "google",
        "structlog",
        "huggingface_hub",
        "asyncio",
        "starlette",
    }


def test_the_scheduler_loads_nothing_that_fetches_models() -> None:
    assert offending("scheduler_svc", "huggingface_hub") == []
    program = "import sys, scheduler_svc.server, octavo.commands.scheduler; print('huggingface_hub' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "False", ended.stderr


def test_a_worker_is_started_before_anything_is_imported_that_it_does_not_need() -> None:
    program = (
        "import sys, octavo.llm, octavo.commands.serve, octavo.models.fetch, octavo.embedded.worker_process;"
        "print([name for name in ('structlog', 'numpy', 'tokenizers', 'huggingface_hub') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("package", ["scheduler_svc", "gateway_svc", "octavo"])
def test_everything_imports_where_torch_and_triton_are_absent(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
for absent in ("torch", "triton", "transformers"):
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
