"""Twenty steps of the example on every mesh of the world, against one process."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

import train_helpers as helpers  # noqa: E402
import train_lm  # noqa: E402

from dtensor import get_rank, init_device_mesh  # noqa: E402


def main() -> None:
    """Compare losses and gradients on this rank; rank 0 says what was compared."""
    torch.set_num_threads(1)
    text = helpers.corpus()
    want = helpers.history(train_lm.Trainer(helpers.TINY, text, None))
    for shape, names in helpers.MESHES.items():
        for local in (False, True):
            options = replace(helpers.TINY, local_activations=local)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            got = helpers.history(train_lm.Trainer(options, text, mesh))
            apart = helpers.distance(got, want)
            if not apart < 1e-9:
                raise AssertionError(f"{shape}, local={local}: {apart} apart")
            if get_rank() == 0:
                print(f"{shape} local={local} equal")


if __name__ == "__main__":
    main()
