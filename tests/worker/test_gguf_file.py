"""`octavo.models.gguf_file` beside the reader of the `gguf` package, and what it says of damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.models.errors import GGUFError
from octavo.models.gguf_file import GgufFile

Kind = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with values and numbers of many types."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "naïve ☃")
    writer.add_array("a.tokens", ["a", "", "Ġb", "☃"])
    writer.add_array("a.scores", [0.5, -1.25])
    writer.add_array("a.types", [1, 3, -5])
    writer.add_array("a.flags", [True, False])
    writer.add_uint8("a.uint8", 255)
    writer.add_int16("a.int16", -300)
    writer.add_uint64("a.uint64", 1 << 60)
    writer.add_float32("a.float32", 1e-5)
    writer.add_float64("a.float64", 1e-5)
    writer.add_bool("a.bool", True)
    random = np.random.default_rng(0)
    writer.add_tensor("f32", random.random((3, 4), np.float32))
    writer.add_tensor("f16", random.random((2, 3, 4)).astype(np.float16))
    writer.add_tensor("one", random.random(7, np.float32))
    writer.add_tensor("bf16", random.integers(0, 255, (5, 32), np.uint8), raw_dtype=Kind.BF16)
    writer.add_tensor("q8", random.integers(0, 255, (5, 34), np.uint8), raw_dtype=Kind.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_the_package_reads(path: Path) -> None:
    expected, found = gguf.GGUFReader(path), GgufFile(path)
    values = {name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert found.values == values
    assert [type(value) for value in found.values.values()] == [type(value) for value in values.values()]
    assert [tensor.name for tensor in found.tensors] == ["f32", "f16", "one", "bf16", "q8"]
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert (mine.name, mine.kind, mine.shape) == (theirs.name, theirs.tensor_type, tuple(theirs.shape[::-1]))
        assert mine.data.dtype == theirs.data.dtype
        np.testing.assert_array_equal(mine.data, theirs.data)


def test_every_shorter_file_is_refused_in_one_line(path: Path, tmp_path: Path) -> None:
    whole, part = path.read_bytes(), tmp_path / "part.gguf"
    data = 5 * 34  # of the last tensor; what follows it are pads
    end = whole.rindex(GgufFile(path).tensors[-1].data.tobytes()) + data
    for length in [*range(0, end, 13), end - 1]:
        part.write_bytes(whole[:length])
        with pytest.raises(GGUFError, match=r"^this is not a readable GGUF file: .+$"):
            GgufFile(part)
    part.write_bytes(whole[:end])
    assert len(GgufFile(part).tensors) == 5


@pytest.mark.parametrize(
    ("place", "written", "why"),
    [
        (0, b"PK", "begins with"),
        (4, struct.pack("<I", 1), "version 1 are not read"),
        (4, struct.pack(">I", 3), "version 50331648 are not read"),
        (8, struct.pack("<Q", 1 << 62), "damaged near byte"),
        (16, struct.pack("<Q", 1 << 62), "damaged near byte"),
        (24, struct.pack("<Q", 1 << 62), "damaged near byte"),
    ],
)
def test_a_damaged_header_is_refused_in_one_line(
    path: Path, tmp_path: Path, place: int, written: bytes, why: str
) -> None:
    damaged, content = tmp_path / "damaged.gguf", bytearray(path.read_bytes())
    content[place : place + len(written)] = written
    damaged.write_bytes(content)
    with pytest.raises(GGUFError, match=why):
        GgufFile(damaged)


def test_a_type_of_numbers_that_is_newer_than_the_package_is_named(path: Path, tmp_path: Path) -> None:
    """As of a file that a newer llama.cpp has made, which is not damaged."""
    newer, described = tmp_path / "newer.gguf", b"\x02\0\0\0\0\0\0\0q8" + struct.pack("<I2Q", 2, 32, 5)
    written = path.read_bytes()
    assert written.count(described) == 1
    before, _, behind = written.partition(described)
    newer.write_bytes(before + described + struct.pack("<I", 199) + behind[4:])
    with pytest.raises(GGUFError, match=r"^tensor 'q8' is of type 199, which is not read$"):
        GgufFile(newer)


def test_bytes_anywhere_in_the_header_may_be_wrong(path: Path, tmp_path: Path) -> None:
    """It is read, with other values, or refused; nothing else is raised."""
    damaged, content = tmp_path / "damaged.gguf", path.read_bytes()
    refused = 0
    for place in range(0, 700, 3):
        damaged.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        try:
            GgufFile(damaged)
        except GGUFError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 50
