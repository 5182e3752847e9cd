"""Starting a suite's ranks, watching their progress, and ending them in time."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dtensor
from dtensor.benchmarks.registry import Suite
from dtensor.benchmarks.results import SuiteResult, unpack_suite
from dtensor.benchmarks.worker import progress_file
from dtensor.rank_environment import THREAD_VARIABLES

START = 120.0  # seconds until the ranks must have met
Tell = Callable[[int, int, str], None]


class JobError(RuntimeError):
    """A suite gave no result; the message says why."""


@dataclass(frozen=True, slots=True)
class Job:
    """How a suite is run.

    Attributes:
        ranks: Where the suite leaves it open.
        rounds: Samples of each candidate.
        device: ``"cpu"`` or ``"cuda"``.
        quick: Fewer sizes.
        tiny: The smallest sizes alone.
        timeout: Seconds, or None for the suite's own.
    """

    ranks: int = 2
    rounds: int = 25
    device: str = "cpu"
    quick: bool = False
    tiny: bool = False
    timeout: float | None = None

    def command(self, suite: Suite, out: Path) -> list[str]:
        """The command line; ranks are started by ``dtensor-run``."""
        ranks = self.ranks if suite.ranks is None else suite.ranks
        launcher = ["-m", "dtensor.launch", "-n", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, "-m", "dtensor.benchmarks.worker"]
        command += [suite.name, "--out", str(out), "--rounds", str(self.rounds)]
        command += ["--device", self.device]
        command += [f"--{name}" for name in ("quick", "tiny") if getattr(self, name)]
        return command


def job_environment() -> dict[str, str]:
    """One thread per rank; the tree that this file lies in is the one measured."""
    environ = dict(os.environ)
    for name in THREAD_VARIABLES:
        environ.setdefault(name, "1")
    root = str(Path(dtensor.__file__).parent.parent)
    path = [root, environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return environ


def run_job(suite: Suite, job: Job, tell: Tell) -> SuiteResult:
    """Run a suite on ranks of its own.

    Args:
        suite: Which.
        job: How.
        tell: Called as it goes on, with (done, total, what comes next).

    Raises:
        JobError: It failed, or took too long; the message has the end of its output.
    """
    limit = suite.timeout if job.timeout is None else job.timeout
    with tempfile.TemporaryDirectory(prefix="dtensor-bench-") as folder:
        out, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("w") as sink:
            process = subprocess.Popen(
                job.command(suite, out),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=job_environment(),
                start_new_session=True,
            )
        try:
            progress = progress_file(out)
            code = _watch(process, progress, time.monotonic() + limit, tell)
            met = progress.exists()
        finally:
            _end(process)
        if code == 0 and out.exists():
            return unpack_suite(suite.name, json.loads(out.read_text()))
        how = f"exit code {code}"
        if code is None:
            late = f"no end in {limit:g} s"
            how = late if met else f"ranks that did not meet in {min(limit, START):g} s"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
    raise JobError(
        f"run_job: suite {suite.name!r} gave no result, got {how}, expected exit code "
        f"0. Look at the end of its output:\n{tail}"
    )


def _watch(
    process: subprocess.Popen[bytes], progress: Path, deadline: float, tell: Tell
) -> int | None:
    """The exit code, or None once the time is up."""
    seen, start = 0, time.monotonic() + START
    while True:
        code = process.poll()
        with contextlib.suppress(FileNotFoundError):
            lines = progress.read_text().split("\n")[:-1]
            for line in lines[seen:]:
                done, total, label = json.loads(line)
                tell(done, total, label)
            seen = len(lines)
        late = time.monotonic() > (deadline if seen else min(start, deadline))
        if code is not None or late:
            return code
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the job with all of its ranks: they share the process group."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[Tell]:
    """A bar where there are a terminal and rich, else nothing until the table.

    Gives the function to tell of progress.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda done, total, label: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn(name),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task("starts", total=None)
        yield lambda done, total, label: bar.update(
            task, completed=done, total=total, description=label
        )
