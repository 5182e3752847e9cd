"""The feed-forward of the proposal: laid out where it is built, by the ambient mesh.

    dtensor-run -n 4 examples/feedforward.py

The class has the signature of the serial model. The same seed makes the same weights
with and without a mesh, so both are compared here, gradients included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    get_rank,
    get_world_size,
    init_device_mesh,
)
from dtensor.styles import Colwise, Rowwise, parallelize_module


@dataclass(frozen=True)
class Config:
    """Widths of the stream and of the layer inside."""

    dim: int = 16
    hidden_dim: int = 40


class FeedForward(nn.Module):
    """Gated feed-forward, tensor-parallel over the mesh it is built in."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w1 = parallelize_module(w1, Colwise)
        self.w2 = parallelize_module(w2, Rowwise)
        self.w3 = parallelize_module(w3, Colwise)

    def forward(self, x: Tensor) -> Tensor:
        y = self.w2(F.silu(self.w1(x)) * self.w3(x))  # DTensor, Partial
        out: Tensor = y.redistribute(Replicate())  # or return y as it is
        return out


class Serial(nn.Module):
    """The same in one process."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


def compare(device_mesh: DeviceMesh, config: Config | None = None) -> float:
    """Largest difference from the serial model: output and all gradients.

    Args:
        device_mesh: Any mesh that this rank is on.
        config: Widths.
    """
    config = Config() if config is None else config
    torch.manual_seed(0)
    serial = Serial(config).double()
    torch.manual_seed(0)
    with device_mesh:
        model = FeedForward(config).double()

    x = torch.randn(4, 3, config.dim, dtype=torch.float64)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    y1, y2 = serial(x1), model(x2)
    y1.square().mean().backward()
    y2.square().mean().backward()
    pairs = [(y1, y2), (x1.grad, x2.grad)]
    for p, q in zip(serial.parameters(), model.parameters(), strict=True):
        pairs.append((p.grad, q.grad))
    return max(_distance(a, b) for a, b in pairs)


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        return float("inf")
    if isinstance(b, DTensor):
        b = b.full_tensor()
    return float((a - b).detach().abs().max())


def main() -> None:
    """Compare on a line of all ranks and, where there are four, on a grid."""
    n = get_world_size()
    meshes = [init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))]
    if n % 2 == 0:
        meshes.append(init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("dp", "tp")))
    for mesh in meshes:
        apart = compare(mesh)
        if get_rank() == 0:
            print(f"{mesh}: largest difference from the serial model {apart:.2g}")


if __name__ == "__main__":
    main()
