"""Takes the compiler's process along."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from kernels.gpu.variant import Variant


class _Deadly:
    """Looks like a kernel until its arguments are asked for."""

    @property
    def arg_names(self) -> Any:
        os._exit(3)


def variants() -> Iterator[Variant]:
    yield Variant("deadly", _Deadly(), {}, {})
