"""``dtensor-bench``: run suites, print their tables, keep and compare results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dtensor.benchmarks import compare, environment, plots, report, results, tables
from dtensor.benchmarks.jobs import Job, JobError, run_job, show_progress
from dtensor.benchmarks.registry import available, choose


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="dtensor-bench",
        description="Measure this runtime against what one would use instead: plain "
        "torch, PyTorch's DTensor, hand-written code over mpi4py. All candidates are "
        "timed in turn within one run.",
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="suite", help="which; without, all (see --list)")
    add("--list", action="store_true", help="list the suites and end")
    add("--ranks", type=int, default=2, help="MPI ranks of a suite that takes any")
    add("--rounds", type=int, help="samples of each candidate (25; quick: 15)")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--quick", action="store_true", help="fewer sizes: a look in minutes")
    add("--tiny", action="store_true", help="smallest sizes: do the suites work?")
    add("--timeout", type=float, help="seconds for each suite")
    add("--json", type=Path, metavar="FILE", help="write all samples")
    add("--from", dest="source", type=Path, metavar="FILE", help="show a --json file")
    add("--plot", type=Path, metavar="DIR", help="write plots (SVG)")
    add("--report", type=Path, metavar="FILE.md", help="write a page, with plots")
    add("--compare", type=Path, metavar="OLD", help="flag what got slower than OLD")
    return parser.parse_args(arguments)


def measure(names: list[str], job: Job) -> results.Result:
    """Run suites one after the other, and print each as it ends."""
    found, failed = {}, {}
    described = environment.describe()
    print(", ".join(f"{k} {v}" for k, v in described.items()), "\n", flush=True)
    for suite in choose(names):
        try:
            with show_progress(suite.name) as tell:
                found[suite.name] = run_job(suite, job, tell)
        except JobError as error:
            failed[suite.name] = str(error)
            print(f"dtensor-bench: {error}", file=sys.stderr, flush=True)
            continue
        show(found[suite.name])
    return results.Result(described, found, failed)


def show(suite: results.SuiteResult) -> None:
    """Print the tables of a suite, and how many of its bars are reached."""
    for table in tables.tables_of(suite):
        tables.print_table(table)
    reached, total = tables.count_bars(suite)
    bars = f", {reached} of {total} bars reached" if total else ""
    print(f"{suite.name}: {suite.ranks} ranks, {suite.seconds:.0f} s{bars}\n")


def tell_changes(old: results.Result, new: results.Result) -> bool:
    """Print what changed since an earlier run; whether anything got slower."""
    for line in compare.differences(old.environment, new.environment):
        print(f"compare: the runs differ in {line}")
    for line in compare.missing(old, new):
        print(f"compare: not measured now: {line}")
    changes = compare.compare(old, new)
    slower = [c for c in changes if c.slower]
    faster = [c for c in changes if c.faster]
    for title, rows in (("Faster", faster), ("SLOWER", slower)):
        if rows:
            tables.print_table(compare.table_of(rows, title))
    print(
        f"compare: {len(changes)} measures in both runs, {len(slower)} slower and "
        f"{len(faster)} faster beyond the noise"
    )
    return bool(slower)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line, without the name of the command.

    Returns:
        0, or 1 where a suite failed or something got slower; 2 for wrong arguments.
    """
    options = parse(arguments)
    if options.list:
        for suite in available():
            print(f"{suite.name:14} {suite.about}")
        return 0
    rounds = options.rounds or (3 if options.tiny else 15 if options.quick else 25)
    job = Job(
        options.ranks,
        rounds,
        options.device,
        options.quick or options.tiny,
        options.tiny,
        options.timeout,
    )
    old, slower = None, False
    try:
        if options.compare:
            old = results.load(options.compare)
        if options.source:
            result = results.load(options.source)
            for found in result.suites.values():
                show(found)
        else:
            result = measure(options.suites, job)
        if options.json:
            results.save(result, options.json)
        if options.plot:
            plots.plot(result, options.plot)
        if options.report:
            report.write(result, options.report)
        if old is not None:
            slower = tell_changes(old, result)
    except (ValueError, OSError) as error:
        print(f"dtensor-bench: {error}", file=sys.stderr)
        return 2
    return 1 if result.failures or slower else 0


if __name__ == "__main__":
    sys.exit(main())
