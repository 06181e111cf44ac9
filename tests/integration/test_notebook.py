"""`examples/notebook.ipynb` in a real kernel: its cells, a cell that is interrupted, and a kernel that is restarted."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import psutil
import pytest

from tests.tiny_models import make_tiny_llama

if TYPE_CHECKING:  # three seconds, which each process of the suite would take, as it collects all files
    from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
WITHIN_S = 60.0
LONG = """
long = SamplingParams(max_tokens=1000, ignore_eos=True)
try:
    while True:
        open(os.environ["BEGUN"], "w").close()
        llm.generate(["x"] * 64, long, use_tqdm=False)
except KeyboardInterrupt:
    print("interrupted")
print(len(llm.generate("x", SamplingParams(max_tokens=3), use_tqdm=False)))
"""


class Kernel:
    """A kernel and the notebook that it runs, cell by cell."""

    def __init__(self, client: NotebookClient) -> None:
        self.client = client
        self.cells = client.nb.cells
        # Any: the manager is there once the kernel is, and only a local kernel's provisioner has a process id.
        self._manager = cast(Any, client.km)
        self.pid: int = self._manager.provisioner.pid

    def run(self, index: int) -> str:
        """What the cell printed. An exception in it is raised here."""
        cell = self.client.execute_cell(self.cells[index], index)
        return "".join(output.text for output in cell.get("outputs", []) if output.output_type == "stream")

    def restart(self) -> None:
        """At once, as the button does: the kernel is killed."""
        from jupyter_core.utils import run_sync

        run_sync(self._manager.restart_kernel)(now=True)

    def workers(self) -> list[psutil.Process]:
        found = psutil.Process(self.pid).children(recursive=True)
        return [process for process in found if "worker" in process.cmdline()]


def test_it_is_kept_without_outputs() -> None:
    import nbformat

    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells), "every cell has an id of its own"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_its_cells_an_interrupt_and_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):  # nothing of this machine's user
        monkeypatch.setenv(name, str(tmp_path / name))
    begun = tmp_path / "begun"
    model = make_tiny_llama(tmp_path / "tiny")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    first, *others, end = [index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code"]
    notebook.cells.append(nbformat.v4.new_code_cell(LONG))
    client = NotebookClient(notebook, timeout=WITHIN_S, kernel_name="python3")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MODEL": str(model), "BEGUN": str(begun)}
    with client.setup_kernel(env=environment):
        kernel = Kernel(client)
        kernel.run(first)
        (worker,) = kernel.workers()
        printed = [kernel.run(index).splitlines() for index in others]
        assert [len(lines) for lines in printed] == [3, 5], "three outputs, five positions"
        kernel.run(end)
        assert psutil.wait_procs([worker], timeout=WITHIN_S)[1] == [], "the kernel lives, the worker does not"

        kernel.run(first)
        (worker,) = kernel.workers()
        interrupts = threading.Thread(target=interrupt_once_it_is_there, args=[begun, kernel.pid])
        interrupts.start()
        assert kernel.run(len(notebook.cells) - 1).splitlines() == ["interrupted", "1"]
        interrupts.join()
        assert worker.is_running(), "it generates again after an interrupt, with the same worker"

        kernel.restart()
        assert psutil.wait_procs([worker], timeout=WITHIN_S)[1] == [], "a restart ends the worker"


def interrupt_once_it_is_there(begun: Path, pid: int) -> None:
    """As a notebook's button does: to all of the kernel's process group."""
    deadline = time.monotonic() + WITHIN_S
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(os.getpgid(pid), signal.SIGINT)
