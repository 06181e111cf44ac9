"""What every test starts from."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import Phase, settings

from tests import forkserver
from tests.seconds import QUICK_S, ROOT, seconds_of_files

HANGS_AFTER_S = 60.0  # what is over and does not end

# An example may find its core taken by others, or a kernel to compile: no test is about the time that it takes. One
# that fails is told as it is: to make it small takes minutes, more than a test has. `--hypothesis-profile shrinks` does
# that, and begins with what failed last.
QUICKLY = tuple(phase for phase in Phase if phase not in (Phase.shrink, Phase.explain))
settings.register_profile("octavo", deadline=None, print_blob=True, phases=QUICKLY)
settings.register_profile("shrinks", deadline=None, print_blob=True)
settings.load_profile("octavo")

# What a run under nohup ignores, all that it starts would ignore too, and some of that is to be told to end.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Triton reads this when a kernel is defined: without a GPU its interpreter runs them, in numpy, on the CPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# With rich installed, structlog draws the locals of every frame of an error that is logged: half a second each.
structlog.dev.ConsoleRenderer.get_active().exception_formatter = structlog.dev.plain_traceback


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--chaos-results", metavar="FILE", help="write what faults and latency cost, as JSON with hardware and date"
    )
    parser.addoption("--quick", action="store_true", help="only files that take a moment, by tests/seconds.json")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """The processes of `-n` have one fork server (`tests.forkserver`), whose imports take three seconds of a core."""
    node.workerinput["fork_server"] = forkserver.address()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        forkserver.share(config.workerinput["fork_server"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files first: with several processes a slow one begun last would keep one of them alone at the end."""
    seconds = seconds_of_files()

    def seconds_of(item: pytest.Item) -> float:
        return seconds.get(str(item.path.relative_to(ROOT)), 0.0)

    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if seconds_of(item) > QUICK_S])
        items[:] = [item for item in items if seconds_of(item) <= QUICK_S]
    if config.getoption("dist", "no") != "no":  # alone they stay in the order in which they were named
        items.sort(key=seconds_of, reverse=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported and collected is here to stay: without this every full collection of garbage looks through it
    again, and whatever makes many objects, as simulated pools do, takes up to twice as long."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: pytest.CollectReport | pytest.TestReport) -> tuple[str, str, str] | None:
    """What fails is named at once, not only at the end: a run may be cut short."""
    if report.failed and report.when != "collect":  # "???" where the process of a test ended
        is_around = report.when in ("setup", "teardown")
        return ("error" if is_around else "failed"), f"{'E' if is_around else 'F'} {report.nodeid} ", "FAILED"
    return None


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector, call: pytest.CallInfo[None]) -> None:
    """pytest stops watching for hangs with the first failure; but what a failed test leaves behind may hang its end."""
    if call.when != "collect":
        stderr = node.config.stash[fault_handler_stderr_fd_key]  # not the captured one
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True, file=stderr)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """One of several processes that cannot end, as threads of gRPC may keep it from, is ended: its results are told."""
    if hasattr(session.config, "workerinput"):
        faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that sets up logging (`LLM` does) leaves it writing to a stream that was captured for that test alone."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture(autouse=True)
def _draws_do_not_depend_on_tests_before() -> None:
    """Which tests share a process, and torch's generator with it, differs from run to run."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
