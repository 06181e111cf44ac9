"""The committed stubs are what protoc makes of the committed protos."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROTOS = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*.proto")))


def test_stubs_have_not_drifted_from_the_protos(tmp_path: Path) -> None:
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *PROTOS], cwd=ROOT, check=True)
    made = {file.name: file.read_text() for file in (tmp_path / "protos").iterdir()}
    committed = {file.name: file.read_text() for file in (ROOT / "protos").glob("*_pb2*") if file.is_file()}
    tools = importlib.metadata.version("grpcio-tools")
    assert sorted(made) == sorted(committed)
    drifted = [name for name in made if made[name] != committed[name]]
    assert drifted == [], f"`make protos` brings them up to date (grpcio-tools {tools} is installed)"
