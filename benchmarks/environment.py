"""Where and with what a run was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from dtensor.rank_environment import count_cores

# Without starting MPI, and in a process of its own: this one may still want to start it.
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))
"""
_ASK_GPU = """
import torch
if torch.cuda.is_available():
    n = torch.cuda.device_count()
    print(f"{n} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
"""


def ask(command: list[str], folder: Path | None = None) -> str:
    """What a command prints, on one line; "" where it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=folder, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return " ".join(done.stdout.split())


def version_of(name: str) -> str:
    """Version of an installed distribution, or "none"."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def cpu_model() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def memory() -> str:
    """Main memory."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.0f} GiB"


def commit() -> str:
    """Commit of the tree that this file lies in, "+" behind it if it was changed."""
    here = Path(__file__).resolve().parent
    found = ask(["git", "rev-parse", "--short=10", "HEAD"], here)
    if not found:
        return "unknown"
    changed = ask(["git", "status", "--porcelain", "--untracked-files=no"], here)
    return found + ("+" if changed else "")


def describe() -> dict[str, str]:
    """Versions, machine, load, date and commit, by name."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "numpy": version_of("numpy"),
        "mpi4py": version_of("mpi4py"),
        "MPI": ask([sys.executable, "-c", _ASK_MPI]) or "none",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "CPU": cpu_model(),
        "cores": str(count_cores()),
        "memory": memory(),
        "GPU": ask([sys.executable, "-c", _ASK_GPU]) or "none",
        "load": " ".join(f"{x:.2f}" for x in os.getloadavg()),
    }
