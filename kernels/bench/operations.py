"""Which operations there are: every module of the package, or of one in it, that has `variants()`; see
`kernels/gpu/variant.py`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import walk_packages

from kernels.gpu.variant import Variant


def variants(package: str = "kernels.gpu", op: str | None = None) -> Mapping[str, list[Variant]]:
    """Each operation's variants, by the module's name.

    Raises ValueError where there is none, `op` names none of them, or two variants have one name.
    """
    found: dict[str, list[Variant]] = {}
    for module in walk_packages(import_module(package).__path__, f"{package}."):
        listed = None if module.ispkg else getattr(import_module(module.name), "variants", None)
        if listed is not None:
            found[module.name.rpartition(".")[2]] = list(listed())
    if not found:
        raise ValueError(f"no module of {package} has variants()")
    names = [variant.name for of_one in found.values() for variant in of_one]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"more than one variant is called {sorted(twice)[0]!r}")
    if op is None:
        return found
    if op not in found:
        raise ValueError(f"no operation is called {op!r}; there are {', '.join(sorted(found))}")
    return {op: found[op]}
