"""Run the whole sweep over op_db and write what it found: ``make sweep``.

Three sweeps: float32 on a line of 4 ranks (values, gradients, ``out=``, in place),
float32 with mixed placements on a 2x2 mesh, and a sample of the ops in bfloat16 and
int64. The table of the first goes to ``docs/ops.md``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import op_sweep as sweep

PAGE = Path(__file__).parent.parent / "docs" / "ops.md"
# name -> (layouts, dtype, samples at most per entry, form, every n-th entry)
SWEEPS: dict[str, tuple[Any, torch.dtype, int | None, str, int]] = {
    "float32": (sweep.LAYOUTS, torch.float32, None, "call", 1),
    "inplace": (sweep.LAYOUTS, torch.float32, 4, "inplace", 1),
    "out": (sweep.LAYOUTS, torch.float32, 3, "out", 1),
    "grid": (sweep.MIXED, torch.float32, 12, "call", 1),
    "bfloat16": (sweep.LAYOUTS, torch.bfloat16, 4, "call", 3),
    "int64": (sweep.LAYOUTS, torch.int64, 4, "call", 3),
}


def check(job: tuple[str, int]) -> list[sweep.Found]:
    """Run one entry in one sweep; in a process of its own pool."""
    name, index = job
    layouts, dtype, limit, form, _ = SWEEPS[name]
    with sweep.recording():
        op = sweep.entries(dtype)[index]
        return sweep.check_entry(op, layouts, dtype, limit, form)


def jobs_of(names: Sequence[str]) -> list[tuple[str, int]]:
    """The entries of the chosen sweeps."""
    return [
        (name, i)
        for name in names
        for i in range(0, len(sweep.entries(SWEEPS[name][1])), SWEEPS[name][4])
    ]


def cell(found: Sequence[sweep.Found]) -> str:
    """How an op ran in one layout: in the worst of its samples."""
    if any(f.refused for f in found):
        return "refused"
    if any(f.without_rule for f in found):
        return "gathers"
    return "some" if any(f.calls for f in found) else "none"


def page(found: Sequence[sweep.Found], ops: int) -> str:
    """The page for docs/: how each op ran."""
    rows: dict[str, dict[str, list[sweep.Found]]] = {}
    for f in found:
        rows.setdefault(f.op, {}).setdefault(f.layout, []).append(f)
    cells = {
        op: {k: cell(v) for k, v in by.items()}
        for op, by in rows.items()
        if any(f.tensors for v in by.values() for f in v)
    }
    ruled = sum("gathers" not in c.values() for c in cells.values())
    lines = [
        "# How each op runs on shards",
        "",
        "Written by `make sweep`, which runs every sample of torch's own test database",
        "(`op_db`, float32) on 4 ranks with its tensors placed alike and compares values,",
        "shapes, dtypes and gradients with plain torch. A cell tells what the worst of the",
        "samples needed in the forward: **none**, no communication; **some**, a rule moved",
        "what it had to; **gathers**, an op without a rule met whole operands (right, with a",
        "warning).",
        "",
        f"Of {ops} entries, {len(cells)} take tensors and run on dense ones; {ruled} of them"
        " have a rule for",
        "every sample.",
        "",
        "Refused, by a clear error: "
        + "; ".join(f"`{n}` ({why})" for n, why in sweep.REFUSED.items())
        + ".",
        "",
        "| layout | none | some | gathers | refused |",
        "| --- | --- | --- | --- | --- |",
    ]
    for layout in sweep.LAYOUTS:
        kinds = [c.get(layout, "") for c in cells.values()]
        counts = " | ".join(
            str(kinds.count(k)) for k in ("none", "some", "gathers", "refused")
        )
        lines.append(f"| {layout} | {counts} |")
    lines += ["", "| op | S(0) | S(-1) | P(sum) |", "| --- | --- | --- | --- |"]
    for op in sorted(cells):
        c = cells[op]
        row = " | ".join(c.get(k, "") for k in ("S(0)", "S(-1)", "P(sum)"))
        lines.append(f"| {op} | {row} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the chosen sweeps; the exit status says whether all was right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweeps", nargs="*", default=list(SWEEPS), metavar="SWEEP")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", help="entries whose name contains this")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    given = parser.parse_args()
    unknown = set(given.sweeps) - set(SWEEPS)
    if unknown:
        parser.error(f"no sweep {sorted(unknown)}, expected some of {list(SWEEPS)}")
    start, wrong = time.monotonic(), 0
    everything: dict[str, list[sweep.Found]] = {n: [] for n in given.sweeps}
    jobs = jobs_of(given.sweeps)
    if given.only:
        jobs = [
            (n, i)
            for n, i in jobs
            if given.only in sweep.title(sweep.entries(SWEEPS[n][1])[i])
        ]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(given.workers, spawn) as pool:
        for done, (job, found) in enumerate(zip(jobs, pool.map(check, jobs)), 1):
            everything[job[0]] += found
            bad = [f for f in found if f.problem and f.op not in sweep.REFUSED]
            wrong += bool(bad)
            for f in bad[:2]:
                print(f"{job[0]}: {f.op} {f.layout} sample {f.sample}: {f.problem}")
                print(f"    {f.text}", flush=True)
            if done % 100 == 0:
                passed = time.monotonic() - start
                print(f"{done} of {len(jobs)}, {passed:.0f} s", flush=True)
    for name, found in everything.items():
        ops = {f.op for f in found if f.tensors}
        gathers = {f.op for f in found if f.without_rule}
        refused = {f.op for f in found if f.refused}
        print(
            f"{name}: {len(ops)} ops, {len(found)} runs, {len(ops - gathers)} ops by "
            f"rules alone, {len(refused)} refused somewhere"
        )
    print(f"{wrong} ops wrong, {time.monotonic() - start:.0f} s")
    if given.write and not given.only and "float32" in everything:
        PAGE.write_text(page(everything["float32"], len(sweep.entries())))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
