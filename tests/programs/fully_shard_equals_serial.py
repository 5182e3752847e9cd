"""Twenty steps of sharded runs on the ranks of the world, against one process."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from sharded_runs import SERIAL, WAYS, distance, train  # noqa: E402

from dtensor import get_rank, simulate  # noqa: E402


def main() -> None:
    """Compare losses and parameters on this rank; rank 0 says what was compared."""
    torch.set_num_threads(1)
    want = simulate(lambda: train(SERIAL), ranks=1, timeout=200)[0]
    for name in ("fsdp=4", "hybrid", "fsdp x tp", "fsdp x tp, sequence"):
        apart = distance(train(WAYS[name]), want)
        if not apart < 1e-9:
            raise AssertionError(f"{name}: {apart} apart")
        if get_rank() == 0:
            print(f"{name} equal")


if __name__ == "__main__":
    main()
