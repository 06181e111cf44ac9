"""Says which machines a wheel is for: with compiled CPU kernels in it only such as built it, else all. Everything else
stands in pyproject.toml."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel

BUILT = Path(__file__).parent / "kernels" / "cpu" / "native" / "built"


class Wheel(bdist_wheel):
    """A wheel of Python code, and of libraries that know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """For any Python."""
        if not any(BUILT.glob("*.so")):
            return super().get_tag()
        return "py3", "none", sysconfig.get_platform().replace("-", "_").replace(".", "_")


setup(cmdclass={"bdist_wheel": Wheel})
