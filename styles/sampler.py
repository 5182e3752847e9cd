"""Which samples of a dataset each part of a data-parallel axis takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from dtensor.mesh.ambient import mesh_or_ambient
from dtensor.mesh.device_mesh import DeviceMesh


class ShardSampler(Sampler[int]):
    """Gives each coordinate of an axis its part of a dataset, for a ``DataLoader``.

    The samples of an epoch are put in one order, alike on all ranks, and dealt out one
    by one::

        order        5 2 7 0 3 6 1 4
        coordinate 0 5   7   3   1
        coordinate 1   2   0   6   4

    So batches of b on each of n coordinates are together the batches of b n samples that
    one process takes from that order. Ranks that differ along other axes only (of tensor
    parallelism) get the same samples. Nothing is communicated, and torch's own random
    state is left alone.

    Where n does not divide the samples, all coordinates still get as many, so that none
    waits for another at the end: the first ones of the order come twice, or with
    ``drop_last`` the last ones not at all. With ``even=False`` every sample comes once,
    on some coordinates one more: for loops in which ranks do not meet.

    Args:
        dataset: The dataset, or its number of samples.
        mesh: The mesh; the ambient one by default.
        mesh_dim: The axis that the batch is split over, or several, the first slowest.
        shuffle: Draw a new order for each epoch.
        seed: Of the orders; the same on all ranks.
        drop_last: Leave out up to n - 1 samples rather than repeat some.
        even: Give all coordinates the same number of samples.

    Example:
        >>> from dtensor.collectives.simulate import simulate
        >>> from dtensor.mesh.device_mesh import init_device_mesh
        >>> def program():
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        ...     return list(ShardSampler(5, mesh, shuffle=False))
        >>> simulate(program, ranks=2)
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(
        self,
        dataset: Sized | int,
        mesh: DeviceMesh | None = None,
        mesh_dim: str | int | Sequence[str | int] = "dp",
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        even: bool = True,
    ) -> None:
        if not isinstance(dataset, (int, Sized)) or isinstance(dataset, bool):
            raise TypeError(
                f"ShardSampler: the dataset has no length, got {type(dataset).__name__}, "
                "expected a dataset with len(), or a number of samples. Let an iterable "
                "dataset skip what is not its rank's."
            )
        self.length = dataset if isinstance(dataset, int) else len(dataset)
        if self.length < 0:
            raise ValueError(
                f"ShardSampler: a number of samples is not negative, got {dataset}. Give "
                "len(dataset)."
            )
        if drop_last and not even:
            raise ValueError(
                "ShardSampler: drop_last evens the coordinates out, got even=False as "
                "well. Choose one of them."
            )
        mesh = mesh_or_ambient("ShardSampler", mesh)
        names = [mesh_dim] if isinstance(mesh_dim, (str, int)) else list(mesh_dim)
        if mesh.ndim == 1 and names == ["dp"]:
            names = [0]
        self.parts, self.coordinate = 1, 0
        for name in names:
            size = mesh.size(name)
            self.parts *= size
            self.coordinate = self.coordinate * size + mesh.get_local_rank(name)
        self.shuffle, self.seed = shuffle, seed
        self.drop_last, self.even = drop_last, even
        self.epoch = 0
        self._start = 0  # in the order of all coordinates
        self._taken = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; the one of a loaded state goes on where it was."""
        if epoch != self.epoch:
            self.epoch, self._start, self._taken = epoch, 0, 0

    def order(self) -> list[int]:
        """All samples in the order of the epoch; alike on all ranks."""
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def __iter__(self) -> Iterator[int]:
        """This coordinate's samples, from where a loaded state was on."""
        self._start = min(self._position(), self.length)
        self._taken = 0
        order = self.order()
        rest = order[self._start :]
        if self.even:
            extra = len(rest) % self.parts
            if extra and self.drop_last:
                rest = rest[:-extra]
            elif extra:
                missing = self.parts - extra
                again = order * -(-missing // len(order))
                rest += again[:missing]
        for sample in rest[self.coordinate :: self.parts]:
            self._taken += 1
            yield sample
        self._start = self._taken = 0

    def __len__(self) -> int:
        """Number of samples of this coordinate in the pass that runs or comes."""
        rest = self.length - min(self._start, self.length)
        if not self.even:
            return len(range(self.coordinate, rest, self.parts))
        return rest // self.parts if self.drop_last else -(-rest // self.parts)

    def _position(self) -> int:
        return self._start + self._taken * self.parts

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """Where the epoch is, alike on all ranks; for any number of coordinates.

        Args:
            used: Samples of this pass that this coordinate has trained on. By default
                those that were handed out: with workers a ``DataLoader`` asks for some
                before it gives them to the loop, so say it then.
        """
        position = self._position() if used is None else self._start + used * self.parts
        return {
            "epoch": self.epoch,
            "position": position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "length": self.length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state: the next pass gives what is left of that epoch.

        Raises:
            ValueError: The state is of another dataset or another order.
        """
        for name in ("seed", "shuffle", "length"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"ShardSampler: the state is of another order, got {name} "
                    f"{state[name]!r}, expected {getattr(self, name)!r}. Make the "
                    "sampler as the one that the state was saved from."
                )
        self.epoch, self._start, self._taken = state["epoch"], state["position"], 0


__all__ = ["ShardSampler"]
