"""One rank of a suite's job: ``python -m dtensor.benchmarks.worker SUITE --out FILE``.

``cli`` starts it. Rank 0 writes the result to FILE, and its progress, one JSON list a
line, to FILE.progress.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from dtensor.benchmarks.harness import Options
from dtensor.benchmarks.peers import join_ranks
from dtensor.benchmarks.registry import SUITES
from dtensor.benchmarks.results import SuiteResult, pack_suite


def progress_file(out: Path) -> Path:
    """Where rank 0 tells how far it is."""
    return out.with_name(out.name + ".progress")


def run_suite(name: str, options: Options) -> SuiteResult:
    """Run a suite on this rank; called by all ranks of the job."""
    run = SUITES[name].load()
    start, before = time.perf_counter(), os.getloadavg()[0]
    measures = tuple(run(options))
    took = time.perf_counter() - start
    load = before, os.getloadavg()[0]
    return SuiteResult(name, measures, options.ranks.size, took, load)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, run the suite, write its result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ranks = join_ranks()
    progress = progress_file(given.out)

    def tell(done: int, total: int, label: str) -> None:
        if ranks.rank == 0:
            with progress.open("a") as file:
                file.write(json.dumps([done, total, label]) + "\n")

    tell(0, 1, "started")
    result = run_suite(
        given.suite,
        Options(
            ranks=ranks,
            quick=given.quick or given.tiny,
            tiny=given.tiny,
            rounds=given.rounds,
            device=given.device,
            tell=tell,
        ),
    )
    if ranks.rank == 0:
        given.out.write_text(json.dumps(pack_suite(result)))


if __name__ == "__main__":
    main()
