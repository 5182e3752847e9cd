"""ShardSampler: everything once, the same number everywhere, in the middle again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dtensor import ShardSampler, init_device_mesh, simulate


def passes(length: int, ranks: int, **options: Any) -> list[list[int]]:
    """One pass on every coordinate."""

    def program() -> list[int]:
        sampler = ShardSampler(length, init_device_mesh("cpu", (ranks,)), **options)
        found = list(sampler)
        assert len(sampler) == len(found)
        return found

    return simulate(program, ranks=ranks)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 12, 13])
def test_every_sample_is_somewhere(length: int, ranks: int, shuffle: bool) -> None:
    everything = list(range(length))
    rows = passes(length, ranks, shuffle=shuffle)
    assert len({len(row) for row in rows}) == 1
    extra = -length % ranks
    flat = [x for row in rows for x in row]
    assert sorted({*flat}) == everything and len(flat) == length + extra

    rows = passes(length, ranks, shuffle=shuffle, drop_last=True)
    flat = [x for row in rows for x in row]
    assert len({len(row) for row in rows}) == 1
    assert len({*flat}) == len(flat) == length - length % ranks

    rows = passes(length, ranks, shuffle=shuffle, even=False)
    assert sorted(x for row in rows for x in row) == everything
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_batches_are_those_of_one_process() -> None:
    data = TensorDataset(torch.arange(24))

    def program(ranks: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        sampler = ShardSampler(data, mesh, seed=3)
        loader = DataLoader(data, batch_size=8 // ranks, sampler=sampler)
        return [batch.tolist() for (batch,) in loader]

    (alone,) = simulate(lambda: program(1), ranks=1)
    rows = simulate(lambda: program(4), ranks=4)
    for number, batch in enumerate(alone):
        assert sorted(x for row in rows for x in row[number]) == sorted(batch)


def test_ranks_of_other_axes_get_the_same_samples() -> None:
    def program() -> tuple[list[int], list[int]]:
        names = ("a", "tp", "b")
        with init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names):
            one = ShardSampler(10, mesh_dim="b", shuffle=False)
            two = ShardSampler(8, mesh_dim=("a", "b"), shuffle=False)
        return list(one), list(two)

    rows = simulate(program, ranks=8)
    assert [one[0] for one, _ in rows] == [0, 1] * 4
    assert [two[0] for _, two in rows] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_epochs_differ_and_random_state_is_left_alone() -> None:
    def program() -> None:
        sampler = ShardSampler(50, init_device_mesh("cpu", (2,)))
        state = torch.get_rng_state()
        first, again = list(sampler), list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        assert first == again != second
        sampler.set_epoch(0)
        assert list(sampler) == first
        assert torch.equal(torch.get_rng_state(), state)

    simulate(program, ranks=2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_saved_pass_goes_on(ranks: int) -> None:
    """On as many coordinates or on others: what was not taken, once."""

    def begin() -> tuple[list[int], dict[str, Any]]:
        sampler = ShardSampler(24, init_device_mesh("cpu", (2,)))
        sampler.set_epoch(4)
        loader = DataLoader(range(24), batch_size=3, sampler=sampler)  # type: ignore[arg-type]
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen += batch.tolist()
            if number == 1:
                break
        return seen, sampler.state_dict()

    def go_on(state: dict[str, Any]) -> list[int]:
        sampler = ShardSampler(24, init_device_mesh("cpu", (ranks,)))
        sampler.load_state_dict(state)
        sampler.set_epoch(4)  # as the loop over epochs does
        assert len(sampler) == 12 // ranks
        found = list(sampler)
        assert len(list(sampler)) == 24 // ranks  # the next pass is a whole one
        return found

    rows = simulate(begin, ranks=2)
    states = [state for _, state in rows]
    assert states[0] == states[1]
    assert states[0]["position"] == 12
    rest = simulate(lambda: go_on(states[0]), ranks=ranks)
    seen = [x for row, _ in rows for x in row]
    assert sorted(seen + [x for row in rest for x in row]) == list(range(24))


def test_samples_asked_for_early_are_not_counted_where_the_loop_says_so() -> None:
    def program() -> None:
        sampler = ShardSampler(24, init_device_mesh("cpu", (2,)))
        source = iter(sampler)
        taken = [next(source) for _ in range(9)]
        assert sampler.state_dict()["position"] == 18
        other = ShardSampler(24, init_device_mesh("cpu", (2,)))
        other.load_state_dict(sampler.state_dict(used=4))
        assert list(other)[:5] == taken[4:]

    simulate(program, ranks=2)


def test_what_is_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(TypeError, match="the dataset has no length, got generator"):
        ShardSampler((x for x in range(3)), mesh)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a number of samples is not negative, got -1"):
        ShardSampler(-1, mesh)
    with pytest.raises(ValueError, match="drop_last evens the coordinates out"):
        ShardSampler(3, mesh, drop_last=True, even=False)
    with pytest.raises(ValueError, match="ShardSampler: No active device mesh"):
        ShardSampler(3)
    with pytest.raises(ValueError, match="no such axis, got 'fsdp'"):
        ShardSampler(3, mesh, "fsdp")
    state = ShardSampler(3, mesh).state_dict()
    with pytest.raises(ValueError, match="of another order, got length 3, expected 4"):
        ShardSampler(4, mesh).load_state_dict(state)
