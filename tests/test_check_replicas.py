"""check_replicas: finds the first copy that drifted, its axis and its ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from op_harness import place

from dtensor import (
    Colwise,
    Partial,
    ReplicaError,
    Replicate,
    Rowwise,
    Shard,
    check_replicas,
    count_collectives,
    init_device_mesh,
    parallelize_module,
    simulate,
)
from dtensor.replicas import hash_of

torch.set_num_threads(1)
R, S = Replicate(), Shard(0)
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
CUBE = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
ROW = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def model() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2)
    )
    parallelize_module(net, GRID["tp"], {"0": Colwise(), "2": Rowwise()})
    return net


def test_all_is_well() -> None:
    def program() -> dict[Any, Any]:
        net = model()
        with count_collectives() as c:
            assert check_replicas(net) is None
        return c.rows()

    tensors = 2 + 2 + 2 + 3  # the cut ones too: they may have copies on another axis
    for rows in simulate(program, ranks=4):
        assert rows == {("all_gather", "tp"): (1, 8 * (tensors + 1))}


@pytest.mark.parametrize(
    ("name", "at", "axis", "ranks"),
    [
        ("a", 3, "dp", (3,)),
        ("b", 1, "dp", (1, 3)),
        ("c", 2, "dp", (2,)),
        ("d", 2, "dp", (2,)),
        ("e", 3, "dp", (3,)),
    ],
)
def test_names_what_drifted(
    name: str, at: int, axis: str, ranks: tuple[int, ...]
) -> None:
    """On the mesh, cut on one axis, on a slice, plain; of two copies both."""

    def program() -> tuple[str, str, tuple[int, ...]]:
        x = torch.arange(6.0).view(2, 3)
        state: dict[str, Any] = {
            "a": place(x, GRID, (R, R)),
            "b": place(x, GRID, (R, S)),
            "c": place(x, GRID["tp"], (R,)),
            "d": place(x, GRID["dp"], (R,)),
            "e": x.clone(),
            "addends": place(x, GRID, (Partial(), R)),
        }
        check_replicas(state, GRID)
        if GRID.get_rank() == at:
            value = state[name]
            (value.to_local() if hasattr(value, "to_local") else value)[0, 1] += 1e-6
        with pytest.raises(ReplicaError) as error:
            check_replicas(state, GRID)
        found = error.value
        assert str(found).startswith(
            f"check_replicas: the copies of {name!r} differ on axis {found.axis!r}, got "
            "other bits on rank"
        )
        return found.name, found.axis, found.ranks

    found = simulate(program, ranks=4)
    assert found == [found[0]] * 4  # alike on all ranks
    assert found[0] == (name, axis, ranks)


def test_the_majority_is_right() -> None:
    def program() -> None:
        net = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(net.weight)
        torch.nn.init.ones_(net.bias)
        parallelize_module(net, ROW, {})
        if ROW.get_rank() == 0:
            net.weight.to_local().data[2, 2] = -0.0  # type: ignore[operator]
        if ROW.get_rank() == 2:
            net.bias.to_local().data[0] = float("nan")  # type: ignore[operator]
        with pytest.raises(ReplicaError) as error:
            check_replicas(net)
        assert (error.value.name, error.value.axis) == ("weight", "dp")
        assert error.value.ranks == (0,)
        assert str(error.value) == (
            "check_replicas: the copies of 'weight' differ on axis 'dp', got other bits "
            "on rank 0, expected the same on all ranks of the axis. Look for what only "
            "some ranks did: a write into to_local(), a seed, a skipped step; to go on, "
            "load one state on all ranks."
        )
        with pytest.raises(ReplicaError) as error:
            check_replicas({"bias": net.bias})
        assert error.value.ranks == (2,)

    simulate(program, ranks=4)


def test_one_all_gather_per_axis() -> None:
    def program() -> Any:
        x = torch.ones(4)
        state = {
            "a": place(x, CUBE, (R, R, R)),
            "b": place(x, CUBE["dp", "tp"], (R, S)),
            "c": place(x, CUBE["pp"], (R,)),
        }
        with count_collectives() as c:
            check_replicas(state)
        return {k: calls for k, (calls, _) in c.rows().items()}

    for rows in simulate(program, ranks=8):
        assert rows == {("all_gather", a): 1 for a in ("pp", "dp", "tp")}


def test_plain_tensors_need_a_mesh() -> None:
    def program() -> None:
        state = {"x": torch.full((2,), float(ROW.get_rank()))}
        check_replicas(state)
        with pytest.raises(ReplicaError):
            check_replicas(state, ROW)

    simulate(program, ranks=4)


def test_training_keeps_replicas_alike() -> None:
    """A step left out by one rank is found; without that, none drifts."""

    def program() -> None:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        x = place(torch.randn(8, 4, generator=torch.Generator()), GRID["tp"], (R,))
        for _ in range(3):
            net(x).square().mean().backward()
            optimizer.step()
            check_replicas(net)
        clone = copy.deepcopy(net)
        if GRID.get_rank() != 1:
            optimizer.step()
        check_replicas(clone, GRID)
        if GRID.get_rank() > 1:
            check_replicas(net)  # their own copies are alike
        else:
            with pytest.raises(ReplicaError) as error:
                check_replicas(net)
            assert error.value.axis == "tp"
        with pytest.raises(ReplicaError) as error:
            check_replicas(net, GRID)
        assert (error.value.name, error.value.axis) == ("0.weight", "dp")

    simulate(program, ranks=4)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_hash(dtype: torch.dtype) -> None:
    """Every element and every place counts."""
    base = torch.zeros(33).to(dtype)
    seen = {int(hash_of(base)), int(hash_of(base[:0]))}
    for i in range(33):
        x = torch.zeros(33)
        x[i] = 1
        seen.add(int(hash_of(x.to(dtype))))
    assert len(seen) == 35
    two = torch.stack([base, base]).T  # not contiguous
    assert hash_of(two) == hash_of(two.contiguous())
    assert hash_of(two[:, :1]) == hash_of(base)
