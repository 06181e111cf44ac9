"""Options of an `LLM`: who gets them, in which types they may come, and what is said of wrong ones."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from octavo import EngineArgs
from octavo.embedded.options import NOT_EMBEDDED, read_options
from octavo.shared.options import OptionError
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig


def test_each_part_gets_its_own_and_both_what_both_have() -> None:
    worker, scheduler, seed = read_options("tiny", {"max_num_seqs": 8, "block_size": 32, "steps_in_flight": 1})
    assert (worker.model, worker.max_num_seqs, worker.block_size) == ("tiny", 8, 32)
    assert (scheduler.max_num_seqs, scheduler.steps_in_flight) == (8, 1)
    assert seed is None


def test_text_is_read_as_on_the_command_line_and_none_is_the_default() -> None:
    options = {"max_num_seqs": "8", "gpu_memory_utilization": "0.5", "enforce_eager": "true", "quantization": None}
    worker, scheduler, seed = read_options("tiny", {**options, "seed": "3", "scheduler_delay_factor": 1})
    assert (worker.max_num_seqs, worker.gpu_memory_utilization, worker.enforce_eager) == (8, 0.5, True)
    assert (worker.quantization, scheduler.scheduler_delay_factor, seed) == ("none", 1.0, 3)


def test_nobody_reads_along_so_steps_may_take_as_long_as_they_do() -> None:
    assert read_options("tiny", {}).scheduler.step_time_goal == 0.0
    assert read_options("tiny", {"step_time_goal": 0.1}).scheduler.step_time_goal == 0.1


def test_little_is_logged_unless_it_is_asked_for() -> None:
    assert read_options("tiny", {}).worker.log_level == "warning"
    assert read_options("tiny", {}).scheduler.disable_log_stats
    asked = read_options("tiny", {"log_level": "info", "disable_log_stats": False})
    assert (asked.worker.log_level, asked.scheduler.disable_log_stats) == ("info", False)


def test_a_type_of_torch_is_as_good_as_its_name() -> None:
    class Dtype:
        def __str__(self) -> str:
            return "torch.float16"

    assert read_options("tiny", {"dtype": Dtype()}).worker.dtype == "float16"


def test_one_device_may_be_asked_for() -> None:
    assert read_options("tiny", {"tensor_parallel_size": 1, "pipeline_parallel_size": "1"}) == read_options("tiny", {})


def test_a_model_has_a_name() -> None:
    with pytest.raises(OptionError, match="model: '' is no folder"):
        read_options("", {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "eight"}, "max_num_seqs: 'eight' is not a whole number"),
        ({"max_num_seqs": 8.5}, "max_num_seqs: '8.5' is not a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs: True is not a whole number"),
        ({"max_num_seqs": [8]}, "max_num_seqs: list is not a whole number"),
        ({"enforce_eager": "perhaps"}, "enforce_eager: 'perhaps' is not true or false"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0, at least 1 is accepted"),
        ({"preemption_mode": "nonsense"}, "preemption_mode: 'nonsense' is none of "),
        ({"max_num_sequences": 3}, "no option is called max_num_sequences; did you mean max_num_seqs?"),
        ({"xyzzy": 3}, "no option is called xyzzy"),
        ({"port": 3}, "port: an LLM starts a worker of its own"),
        ({"token_file": "t"}, "token_file: an LLM starts a worker of its own"),
        ({"tls_cert_file": "c.pem", "tls_key_file": "k.pem"}, "tls_cert_file: an LLM starts a worker of its own"),
        ({"worker_token_file": "t"}, "worker_token_file: an LLM starts a worker of its own"),
        ({"control_port": 3}, "control_port: an LLM starts a worker of its own"),
        ({"keys_file": "keys.yaml"}, "keys_file: an LLM starts a worker of its own"),
        ({"jwt_jwks_url": "https://issuer"}, "jwt_jwks_url: an LLM starts a worker of its own"),
        ({"insecure": True}, "insecure: an LLM starts a worker of its own"),
        ({"max_connections": 3}, "max_connections: an LLM starts a worker of its own"),
        ({"drain_timeout": 3}, "drain_timeout: an LLM starts a worker of its own"),
        ({"worker_quota": 0}, "worker_quota: an LLM starts a worker of its own"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0, at least 1 is accepted"),
        ({"data_parallel_size": 2}, "data_parallel_size: got 2; the ranks of a worker share one copy of "),
    ],
    ids=str,
)
def test_wrong_ones_are_named_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        read_options("tiny", options)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_what_locks_a_server_is_for_no_llm() -> None:
    groups = {field.name: field.metadata["group"] for cls in (WorkerConfig, SchedulerConfig)
              for field in dataclasses.fields(cls)}  # fmt: skip
    assert {name for name, group in groups.items() if group == "access"} <= NOT_EMBEDDED <= groups.keys()


@pytest.mark.parametrize("name", ["OCTAVO_PORT", "OCTAVO_TOKEN_FILE"])
def test_a_variable_of_a_server_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    with pytest.raises(OptionError, match=f"{name}: no option of this command has that name"):
        EngineArgs.from_cli_args(parser.parse_args([]))
