"""Options: where values come from and in which order, how they are read, and what bad ones get."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway_svc.config import GatewayConfig
from octavo.shared.command_line import Parser, listed
from octavo.shared.options import (
    COMMON,
    LOGGING,
    OptionError,
    add_arguments,
    add_position,
    environment_without_options,
    from_namespace,
    option,
    parse,
    to_arguments,
)
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig


@dataclass(frozen=True)
class Engine:
    host: str = option("127.0.0.1", "Where to listen.")
    port: int = option(50051, "Port; 0 takes a free one.")
    max_num_seqs: int = option(1, "Sequences at most, 100 % of them.")
    max_model_len: int | str | None = option(None, "Longest sequence, or auto.")
    gpu_memory_utilization: float = option(0.9, "Share of the device's memory.")
    enable_prefix_caching: bool = option(True, "Share blocks.")
    preemption_mode: str = option("auto", "What happens to victims.", choices=["auto", "swap", "recompute"])
    worker: tuple[str, ...] = option((), "Address of a worker.", metavar="HOST:PORT")
    folder: Path | None = option(None, "A folder.")
    computed: int = 7  # no option

    def __post_init__(self) -> None:
        if self.max_num_seqs > 1000:
            raise ValueError(f"max_num_seqs {self.max_num_seqs} is above 1000")


@dataclass(frozen=True)
class Device:
    host: str = option("0.0.0.0", "Another meaning of host.")
    block_size: int = option(16, "Tokens a block.")


def read(*argv: str, environ: dict[str, str] | None = None) -> Engine:
    parser = Parser(prog="octavo engine")
    add_arguments(parser, Engine)
    return from_namespace(Engine, parser.parse_args(argv), environ or {})


def test_defaults_hold_when_nothing_is_said() -> None:
    assert read() == Engine()


def test_a_flag_wins_over_a_variable_over_a_key_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("max-num-seqs: 2\nport: 2\nhost: two\n")
    environ = {"OCTAVO_MAX_NUM_SEQS": "3", "OCTAVO_PORT": "3", "OCTAVO_CONFIG": str(file), "PATH": "/bin"}
    assert read("--port", "4", environ=environ) == Engine(host="two", port=4, max_num_seqs=3)


@pytest.mark.parametrize(
    ("argv", "environ", "yaml", "expected"),
    [
        (["--max-model-len", "auto"], {"OCTAVO_MAX_MODEL_LEN": "auto"}, "max_model_len: auto",
         Engine(max_model_len="auto")),
        (["--max-model-len=64"], {"OCTAVO_MAX_MODEL_LEN": "64"}, "max_model_len: 64", Engine(max_model_len=64)),
        (["--max-model-len="], {"OCTAVO_MAX_MODEL_LEN": ""}, "max_model_len:", Engine(max_model_len=None)),
        (["--gpu-memory-utilization", "1"], {"OCTAVO_GPU_MEMORY_UTILIZATION": "1"}, "gpu-memory-utilization: 1",
         Engine(gpu_memory_utilization=1.0)),
        (["--no-enable-prefix-caching"], {"OCTAVO_ENABLE_PREFIX_CACHING": "off"}, "enable_prefix_caching: no",
         Engine(enable_prefix_caching=False)),
        (["--worker", "a:1", "--worker", "b:2"], {"OCTAVO_WORKER": "a:1, b:2"}, "worker: ['a:1', 'b:2']",
         Engine(worker=("a:1", "b:2"))),
        (["--folder", "/x"], {"OCTAVO_FOLDER": "/x"}, "folder: /x", Engine(folder=Path("/x"))),
        (["--preemption-mode", "swap"], {"OCTAVO_PREEMPTION_MODE": "swap"}, "preemption_mode: swap",
         Engine(preemption_mode="swap")),
    ],
)  # fmt: skip
def test_every_source_reads_a_value_alike(
    argv: list[str], environ: dict[str, str], yaml: str, expected: Engine, tmp_path: Path
) -> None:
    (tmp_path / "octavo.yaml").write_text(yaml)
    for found in (read(*argv), read(environ=environ), read("--config", str(tmp_path / "octavo.yaml"))):
        assert found == expected
        assert type(found.gpu_memory_utilization) is float and type(found.worker) is tuple


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "x"], "argument --port: 'x' is not a whole number"),
        (["--preemption-mode", "drop"], "'drop' is none of auto, swap, recompute"),
        (["--max-num", "3"], "no option is called --max-num; did you mean --max-num-seqs?"),
        (["--max_num_seqs=3"], "no option is called --max_num_seqs; did you mean --max-num-seqs?"),
        (["--prot", "3"], "no option is called --prot; did you mean --port?"),
        (["--zebra"], "no option is called --zebra (--help"),
        (["port"], "'port' is one argument too many"),
        (["--preemption-mode", "swop"], "'swop' is none of auto, swap, recompute; did you mean swap?"),
        (["--max-num-seqs", "1001"], "max_num_seqs 1001 is above 1000"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: No such file or directory"),
    ],
)
def test_bad_flags_end_with_one_line_and_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", environment_without_options())
    with pytest.raises(SystemExit) as ended:
        parse(Engine, argv, "octavo engine")
    stderr = capsys.readouterr().err
    assert ended.value.code == 2
    assert stderr.startswith("octavo engine: error: ") and message in stderr and stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"OCTAVO_MAX_NUM_SEQ": "3"}, "OCTAVO_MAX_NUM_SEQ: no option .* name; did you mean OCTAVO_MAX_NUM_SEQS"),
        ({"OCTAVO_COMPUTED": "3"}, "OCTAVO_COMPUTED: no option"),
        ({"OCTAVO_port": "3"}, "OCTAVO_port: no option"),
        ({"OCTAVO_PORT": "many"}, "OCTAVO_PORT: 'many' is not a whole number"),
        ({"OCTAVO_ENABLE_PREFIX_CACHING": "maybe"}, "OCTAVO_ENABLE_PREFIX_CACHING: 'maybe' is not true or false"),
        ({"OCTAVO_SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks: false"),
    ],
)
def test_bad_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        read(environ=environ)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("max_num_seq: 3", "max_num_seq: no option of this command has that name; did you mean max_num_seqs"),
        ("max-num-seqz: 3", "max_num_seqz: no option of this command has that name; did you mean max_num_seqs"),
        ("zebra: 3", "zebra: no option of this command has that name$"),
        ("config: other.yaml", "config: no option"),
        ("port: many", "port: 'many' is not a whole number"),
        ("port: 1.5", "port: '1.5' is not a whole number"),
        ("port: yes", "port: True is not accepted"),
        ("port:", "port: '' is not a whole number"),
        ("port: [1]", "port: one value is wanted, not a list"),
        ("preemption_mode: drop", "'drop' is none of auto, swap, recompute"),
        ("- port", "a mapping of option names to values is wanted"),
        ("port: [", "while parsing"),
    ],
)
def test_bad_keys_are_named_with_their_file(yaml: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(yaml)
    with pytest.raises(OptionError, match=message) as refused:
        read("--config", str(file))
    assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def test_the_cache_folder_is_no_option_and_disturbs_none() -> None:
    assert read(environ={"OCTAVO_CACHE": "/x"}) == Engine()


def test_how_long_clients_wait_is_no_option_but_of_the_gateway() -> None:
    environ = {"OCTAVO_RETRY_WINDOW": "5"}
    assert read(environ=environ) == Engine() and environment_without_options(environ) == {}
    parser = Parser(prog="octavo gateway")
    add_arguments(parser, GatewayConfig)
    assert from_namespace(GatewayConfig, parser.parse_args([]), environ).retry_window == 5


def test_one_command_takes_the_options_of_two_services(tmp_path: Path) -> None:
    (tmp_path / "both.yaml").write_text("block_size: 8\nport: 1\n")
    parser = Parser(prog="octavo serve")
    add_arguments(parser, Engine)
    add_arguments(parser, Device)
    namespace = parser.parse_args(["--config", str(tmp_path / "both.yaml"), "--host", "::"])
    assert from_namespace(Engine, namespace, {"OCTAVO_BLOCK_SIZE": "4"}) == Engine(host="::", port=1)
    assert from_namespace(Device, namespace, {"OCTAVO_BLOCK_SIZE": "4"}) == Device(host="::", block_size=4)


def test_subcommands_keep_their_options_apart() -> None:
    parser = Parser(prog="octavo")
    commands = parser.add_subparsers(dest="command")
    for name, cls in (("engine", Engine), ("device", Device)):
        add_arguments(commands.add_parser(name), cls)
    namespace = parser.parse_args(["device", "--block-size", "8"])
    assert from_namespace(Device, namespace, {}) == Device(block_size=8)
    with pytest.raises(OptionError, match="OCTAVO_PORT"):
        from_namespace(Device, namespace, {"OCTAVO_PORT": "1"})


@pytest.mark.parametrize(
    "engine",
    [
        Engine(),
        Engine(host="-odd", port=0, worker=("a:1", "b:2"), folder=Path("/x y"), max_model_len="auto"),
        Engine(enable_prefix_caching=False, gpu_memory_utilization=0.1, preemption_mode="swap"),
    ],
)
def test_options_travel_to_a_child_as_flags(engine: Engine) -> None:
    assert read(*to_arguments(engine)) == engine


def test_a_childs_environment_has_the_parents_options_removed() -> None:
    kept = {"PATH": "/bin", "OCTAVO_CACHE": "/x"}
    assert environment_without_options({**kept, "OCTAVO_PORT": "1"}) == kept


def test_help_shows_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Engine, ["--help"], "octavo engine")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert "--max-num-seqs N Sequences at most, 100 % of them. (default: 1)" in text
    assert "--[no-]enable-prefix-caching Share blocks. (default: on)" in text
    assert "--preemption-mode auto|swap|recompute" in text
    assert "--worker HOST:PORT Address of a worker. (default: none)" in text
    assert "--computed" not in text


def test_a_namespace_made_by_hand_works_too() -> None:
    assert from_namespace(Device, argparse.Namespace(block_size=2), {}) == Device(block_size=2)


def test_a_port_out_of_range_is_refused_by_either_service() -> None:
    for port in (-5, 65536):
        for make in (SchedulerConfig, WorkerConfig):
            with pytest.raises(ValueError, match=f"port is {port}; 0 to 65535 is accepted"):
                make(port=port)
        with pytest.raises(ValueError, match=f"metrics_port is {port}"):
            SchedulerConfig(metrics_port=port)


@dataclass(frozen=True)
class Grouped:
    talk: str = option("some", "Lines to write.", group=LOGGING)
    color: str = option("red", "Of the thing.", group="looks")
    name: str = option("x", "Of the thing, too.", group=COMMON)
    stray: int = option(1, "In no group.")
    later: int = option(0, "Not for anyone yet.", hidden=True)


def test_help_has_headings_in_order_and_hides_what_nobody_can_use_yet() -> None:
    parser = Parser(prog="octavo grouped")
    add_arguments(parser, Grouped)
    add_arguments(parser, Device, without=("host",))
    shown = parser.format_help()
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["options:", "common:", "looks:", "logging and metrics:", "other:"]
    assert "--later" not in shown and "--block-size" in shown and "--host" not in shown
    assert from_namespace(Grouped, parser.parse_args(["--later", "2"]), {}).later == 2
    with pytest.raises(OptionError, match="OCTAVO_HOST"):
        from_namespace(Grouped, parser.parse_args([]), {"OCTAVO_HOST": "x"})


@pytest.mark.parametrize("argv", [["x"], ["--name", "x"], ["--color", "blue", "x"], ["x", "--color", "blue"]])
def test_a_position_stands_for_its_option(argv: list[str]) -> None:
    parser = Parser(prog="octavo grouped")
    add_arguments(parser, Grouped)
    add_position(parser, "name")
    assert from_namespace(Grouped, parser.parse_args(argv), {"OCTAVO_NAME": "y"}).name == "x"
    assert from_namespace(Grouped, parser.parse_args([]), {"OCTAVO_NAME": "y"}).name == "y"
    with pytest.raises(OptionError, match="the name is given twice"):
        from_namespace(Grouped, parser.parse_args([*argv, "--name", "z"] if "--name" not in argv else [*argv, "z"]), {})


def test_names_are_listed_as_a_sentence_has_them() -> None:
    assert [listed("a"), listed("ab"), listed("abc")] == ["'a' is", "'a' and 'b' are", "'a', 'b' and 'c' are"]
