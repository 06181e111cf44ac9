"""Models by their names on the hub, against a local one: which files are taken, from where, and what is said else."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from octavo.models.errors import FetchError
from octavo.models.fetch import available
from octavo.models.hub_cache import HubName, find, size_of, wanted_files
from tests.adapters import make_adapter
from tests.fake_hub import TOKEN, FakeHub
from tests.forkserver import ForkedCommand
from tests.tiny_models import make_tiny_llama

ROOT = Path(__file__).parents[2]
REPO = "tiny/Llama-Tiny"
OTHERS = {"README.md": b"#", "onnx/model.onnx": b"o", "pytorch_model.bin": b"pickle", "run.py": b"boom", "a.h5": b"h"}
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    yield hub
    hub.close()


@pytest.fixture
def octavo(hub: FakeHub, tmp_path: Path) -> Command:
    """Runs one command with caches and a hub of its own."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OCTAVO_"))}
        own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "OCTAVO_CACHE": str(tmp_path / "octavo")}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            environment = {**kept, **own, **variables}
            command = ForkedCommand(arguments, err.fileno(), stdout=out.fileno(), environment=environment)
            try:
                code = command.wait(timeout=60)
            finally:
                command.kill()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command.args, code, out.read(), err.read())

    return run


def fetched(done: subprocess.CompletedProcess[str]) -> Path:
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def reason(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of a command that failed as it should."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    return done.stderr.splitlines()[-1]


def test_a_model_is_fetched_by_its_name_found_offline_listed_and_removed(
    hub: FakeHub, octavo: Command, files: dict[str, bytes], tmp_path: Path
) -> None:
    first = hub.add(REPO, {**files, **OTHERS})
    done = octavo("model", "fetch", REPO)
    folder = fetched(done)
    assert folder == tmp_path / "hf" / "hub" / "models--tiny--Llama-Tiny" / "snapshots" / first
    assert {path.name for path in folder.iterdir()} == set(files), "no pickle, no code, no other format"
    assert len(done.stderr.splitlines()) == 1 and "%" not in done.stderr, "a bar is for terminals"

    num_requests = len(hub.requests)
    found = octavo("model", "fetch", REPO, "--json", HF_HUB_OFFLINE="1")
    assert json.loads(found.stdout) == {"name": REPO, "path": str(folder)} and len(hub.requests) == num_requests
    listed = octavo("model", "list").stdout
    assert f"{first[:8]}" in next(line for line in listed.splitlines() if line.startswith(REPO))
    assert len(hub.requests) == num_requests, "a list asks nobody"

    second = hub.add(REPO, {**files, "README.md": b"##", "generation_config.json": b"{}"})
    assert fetched(octavo("model", "fetch", REPO)).name == second
    assert fetched(octavo("model", "fetch", f"{REPO}@{first}")).name == first
    shown = octavo("model", "show", REPO).stdout
    assert f"revision    {second}  main" in shown and f"revision    {first}\n" in shown

    assert octavo("model", "rm", REPO).returncode == 2, "nobody is there to ask"
    of_one = size_of(HubName(REPO, first), tmp_path / "hf" / "hub")
    removed = json.loads(octavo("model", "rm", f"{REPO}@{first}", "--yes", "--json").stdout)
    assert 0 < removed["freed_bytes"] == of_one < sum(len(data) for data in files.values())
    assert [path.name for path in folder.parent.iterdir()] == [second]
    removed = json.loads(octavo("model", "rm", "--yes", "--json", REPO).stdout)
    assert removed["name"] == REPO and removed["freed_bytes"] > 0
    assert REPO not in octavo("model", "list").stdout
    assert "did you mean" not in reason(octavo("model", "show", REPO))


def test_no_quantisation_is_removed_by_itself(hub: FakeHub, octavo: Command) -> None:
    repo = "tiny/Tiny-GGUF"
    hub.add(repo, {"t-Q4_K_M.gguf": b"four", "t-Q8_0.gguf": b"eight"})
    kept = [fetched(octavo("model", "fetch", f"{repo}:{name}")) for name in ("Q4_K_M", "Q8_0")]
    for name in ("Q4_K_M", "t-Q8_0.gguf"):
        said = reason(octavo("model", "rm", f"{repo}:{name}", "--yes"))
        assert f"`octavo model rm {repo}` removes all" in said and all(file.is_file() for file in kept)
    assert octavo("model", "rm", repo, "--yes").returncode == 0
    assert not any(file.exists() for file in kept)


def test_a_worker_fetches_what_it_is_to_load_and_is_known_by_its_name(
    hub: FakeHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker_svc.config import WorkerConfig
    from worker_svc.server import load

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.add(REPO, files, branch="v2")
    runner, tokenizer = load(WorkerConfig(model=f"{REPO}@v2", download_dir=str(tmp_path), num_threads=1))
    assert runner.config.model_name == REPO and tokenizer.sha256
    assert (tmp_path / "models--tiny--Llama-Tiny").is_dir()
    num_requests = len(hub.requests)
    load(WorkerConfig(model=f"{REPO}@v2", download_dir=str(tmp_path), tokenizer=f"{REPO}@v2", num_threads=1))
    assert len(hub.requests) == num_requests, "it is here"


def test_an_adapter_is_fetched_by_its_name_and_nothing_else_of_its_repository(
    hub: FakeHub, files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker_svc.adapters.errors import AdapterError
    from worker_svc.config import WorkerConfig
    from worker_svc.server import load

    model = tmp_path / "model"
    model.mkdir()
    for name, content in files.items():
        (model / name).write_bytes(content)
    made = {path.name: path.read_bytes() for path in make_adapter(tmp_path / "made", model).iterdir()}
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.add("tiny/pirate", made | {"optimizer.bin": b"of its training"})
    hub.add("tiny/nothing", {"README.md": b"empty"})
    runner, _ = load(WorkerConfig(model=str(model), download_dir=str(tmp_path), num_threads=1, enable_lora=True))
    assert runner.adapters is not None
    assert runner.adapters.read("tiny/pirate").parts
    (snapshot,) = (tmp_path / "models--tiny--pirate" / "snapshots").iterdir()
    assert sorted(path.name for path in snapshot.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    num_requests = len(hub.requests)
    assert runner.adapters.read("tiny/pirate").parts and len(hub.requests) == num_requests, "it is here"
    with pytest.raises(AdapterError, match=r"tiny/nothing is no adapter: it has no adapter_config\.json"):
        runner.adapters.read("tiny/nothing")


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: FakeHub, octavo: Command, files: dict[str, bytes]) -> None:
    hub.add(REPO, files)
    other = hub.add(REPO, {**files, "generation_config.json": b'{"temperature": 0.5}'}, branch="v2")
    assert fetched(octavo("model", "fetch", f"{REPO}@v2")).name == other
    assert reason(octavo("model", "fetch", f"{REPO}@v3")) == f"octavo model: error: {REPO} has no revision 'v3'"


def test_a_wrong_name_gets_the_nearest_one(hub: FakeHub, octavo: Command, files: dict[str, bytes]) -> None:
    hub.add(REPO, files)
    assert reason(octavo("model", "fetch", "tiny/Lama-Tiny")).endswith(f"; did you mean {REPO}?")
    assert "did you mean" not in reason(octavo("model", "fetch", "nobody/zebra"))
    said = octavo("serve", "tiny/Lama-Tiny", "--port", "0")
    assert reason(said).startswith("octavo serve: error: the hub has no model tiny/Lama-Tiny")


def test_a_gated_model_says_what_is_needed(hub: FakeHub, octavo: Command, files: dict[str, bytes]) -> None:
    hub.add(REPO, files)
    hub.gated.add(REPO)
    for variables in ({}, {"HF_TOKEN": "hf_wrong"}):
        said = reason(octavo("model", "fetch", REPO, **variables))
        assert "is gated" in said and "HF_TOKEN" in said and f"{hub.url}/{REPO}" in said
    fetched(octavo("model", "fetch", REPO, HF_TOKEN=TOKEN))


def test_a_login_of_the_hubs_own_tool_counts(
    hub: FakeHub, octavo: Command, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add(REPO, files)
    hub.gated.add(REPO)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text(TOKEN)
    assert (fetched(octavo("model", "fetch", REPO)) / "config.json").read_bytes() == files["config.json"]


def test_a_download_that_broke_off_goes_on(hub: FakeHub, octavo: Command, files: dict[str, bytes]) -> None:
    large = os.urandom(1 << 20) * 24
    hub.add(REPO, {**files, "model.safetensors": large})
    hub.breaks_off.add("model.safetensors")
    done = octavo("model", "fetch", REPO)
    if done.returncode:  # versions of the library differ in whether they try again by themselves
        assert "run it again" in reason(done)
        done = octavo("model", "fetch", REPO)
    assert (fetched(done) / "model.safetensors").read_bytes() == large
    ranges = [range for method, path, range in hub.requests if method == "GET" and path.endswith("model.safetensors")]
    assert len(ranges) == 2 and ranges[1] == "bytes=10485760-", "all that the library had written of its 10 MiB pieces"


def test_a_damaged_file_is_not_kept(hub: FakeHub, octavo: Command, files: dict[str, bytes]) -> None:
    hub.add(REPO, files)
    hub.damaged.add("model.safetensors")
    said = reason(octavo("model", "fetch", REPO))
    assert said.endswith("model.safetensors: the sha256 sum is not what the hub says")
    assert "is not in the cache" in reason(octavo("model", "fetch", REPO, HF_HUB_OFFLINE="1"))
    hub.damaged.clear()
    assert (fetched(octavo("model", "fetch", REPO)) / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_damaged_files_are_not_kept_though_one_came_in_a_fetch_that_broke_off(
    hub: FakeHub, octavo: Command, files: dict[str, bytes]
) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = json.dumps({"weight_map": {"a": one, "b": two}}).encode()
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.add(REPO, {**rest, one: b"one", two: b"two", "model.safetensors.index.json": index})
    hub.damaged |= {one, two}
    hub.unavailable.add(two)
    assert "status 503" in reason(octavo("model", "fetch", REPO))
    hub.unavailable.clear()
    assert reason(octavo("model", "fetch", REPO)).endswith(f"{one}, {two}: the sha256 sum is not what the hub says")
    hub.damaged.clear()
    folder = fetched(octavo("model", "fetch", REPO))
    assert ((folder / one).read_bytes(), (folder / two).read_bytes()) == (b"one", b"two")


def test_a_model_that_is_not_here_and_no_hub(octavo: Command) -> None:
    assert reason(octavo("worker", REPO, HF_HUB_OFFLINE="1")).endswith(
        f"{REPO} is not in the cache, and HF_HUB_OFFLINE is set"
    )
    said = reason(octavo("model", "fetch", REPO, HF_ENDPOINT="http://127.0.0.1:9"))
    assert f"{REPO} is not in the cache, and http://127.0.0.1:9 cannot be reached" in said


@pytest.mark.parametrize(
    ("load_format", "late"), [("auto", "generation_config.json"), ("tokenizer", "tokenizer_config.json")]
)
def test_what_came_but_for_one_small_file_is_not_all(
    hub: FakeHub, files: dict[str, bytes], load_format: str, late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.add(REPO, {**files, late: b"{}"})
    hub.unavailable.add(late)
    with pytest.raises(FetchError, match="status 503"):
        available(REPO, load_format=load_format, download_dir=tmp_path)
    hub.unavailable.clear()
    folder = available(REPO, load_format=load_format, download_dir=tmp_path)
    assert (folder / late).read_bytes() == b"{}"
    num_requests = len(hub.requests)
    assert available(REPO, load_format=load_format, download_dir=tmp_path) == folder
    assert len(hub.requests) == num_requests, "it is here"


def test_a_shard_that_is_missing_makes_a_model_incomplete(
    hub: FakeHub, octavo: Command, files: dict[str, bytes]
) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {name: name.encode() for name in index["weight_map"].values()}
    rest = {name: data for name, data in files.items() if name != "model.safetensors"}
    hub.add(REPO, {**rest, **shards, "model.safetensors.index.json": json.dumps(index).encode()})
    folder = fetched(octavo("model", "fetch", REPO))
    assert set(shards) <= {path.name for path in folder.iterdir()}
    fetched(octavo("model", "fetch", REPO, HF_HUB_OFFLINE="1"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "is not in the cache" in reason(octavo("model", "fetch", REPO, HF_HUB_OFFLINE="1"))


def test_what_is_found_here_is_what_the_library_finds(tmp_path: Path) -> None:
    home = tmp_path / "models--a--b"
    for commit, branch in (("1" * 40, "main"), ("2" * 40, "refs/pr/1")):
        snapshot, ref = home / "snapshots" / commit, home / "refs" / branch
        snapshot.mkdir(parents=True)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (snapshot / name).touch()
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    for revision in (None, "main", "refs/pr/1", "1" * 40, "2" * 40):
        library = snapshot_download("a/b", revision=revision, cache_dir=tmp_path, local_files_only=True)
        assert find(HubName("a/b", revision), "auto", tmp_path) == Path(library)
    assert find(HubName("a/b", "3" * 40), "auto", tmp_path) is None
    with pytest.raises(LocalEntryNotFoundError):
        snapshot_download("a/b", revision="3" * 40, cache_dir=tmp_path, local_files_only=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("a/b-GGUF:Q4_K_M", HubName("a/b-GGUF", None, "Q4_K_M")),
        ("a/b@v1:b.gguf", HubName("a/b", "v1", "b.gguf")),
        ("gpt2", None), ("a/b/c", None), ("../b", None), ("a/b@", None), ("a/b:", None), ("a b/c", None),
    ],
)  # fmt: skip
def test_names(text: str, expected: HubName | None) -> None:
    assert HubName.parse(text) == expected
    if expected:
        assert str(expected) == text


GGUFS = ["m-Q2_K.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf", "mmproj-f16.gguf", "README.md"]


@pytest.mark.parametrize(
    ("files", "name", "load_format", "expected"),
    [
        (GGUFS, "a/b", "auto", ["m-Q4_K_M.gguf"]),
        (GGUFS, "a/b:q2_k", "auto", ["m-Q2_K.gguf"]),
        (GGUFS, "a/b:Q8_0", "auto", ["m.q8_0.gguf"]),
        (GGUFS, "a/b:m-Q4_K_S.gguf", "auto", ["m-Q4_K_S.gguf"]),
        (GGUFS, "a/b:Q4_K", "auto", r"none for 'Q4_K'"),
        (["x.gguf"], "a/b", "auto", ["x.gguf"]),
        (["x-Q2_K.gguf", "x-Q3_K.gguf"], "a/b", "auto", "there is several: a/b:FILE names one of x-Q2_K.gguf"),
        (["x-Q4_K_M-00001-of-00002.gguf", "x-Q4_K_M-00002-of-00002.gguf"], "a/b", "auto", "in parts"),
        (["config.json", "model.safetensors", "consolidated.safetensors", "x.gguf"], "a/b", "auto",
         ["config.json", "model.safetensors"]),
        (["config.json", "model.safetensors", "x.gguf"], "a/b", "gguf", ["x.gguf"]),
        (["config.json", "quantize_config.json", "recipe.yaml", "model-00001-of-00001.safetensors"], "a/b", "auto",
         ["config.json", "quantize_config.json", "model-00001-of-00001.safetensors"]),
        (["config.json", "pytorch_model.bin"], "a/b", "auto", "--load-format bin"),
        (["config.json", "pytorch_model.bin"], "a/b", "bin", ["config.json", "pytorch_model.bin"]),
        (["tokenizer.model", "model.safetensors"], "a/b", "tokenizer", ["tokenizer.model"]),
        (["README.md"], "a/b", "auto", "no weights as safetensors or GGUF"),
    ],
)  # fmt: skip
def test_which_files_are_wanted(files: list[str], name: str, load_format: str, expected: list[str] | str) -> None:
    parsed = HubName.parse(name)
    assert parsed is not None
    if isinstance(expected, str):
        with pytest.raises(FetchError, match=expected):
            wanted_files(files, parsed, load_format)
    else:
        assert wanted_files(files, parsed, load_format) == expected
