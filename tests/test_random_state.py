"""Seeds of DTensors' random numbers: what counts, what is saved, what is replayed."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import dtensor
from dtensor import (
    DTensor,
    Replicate,
    Shard,
    count_collectives,
    get_rank,
    init_device_mesh,
    simulate,
)

T = torch.Tensor
LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def draw(mesh: Any = LINE) -> T:
    places = [Shard(0)] * mesh.ndim
    return dtensor.rand(6, 2, device_mesh=mesh, placements=places).full_tensor()


def alike(found: list[Any]) -> Any:
    """What every rank found, which is the same."""
    for other in found[1:]:
        assert len(other) == len(found[0])
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))
    return found[0]


def test_torch_seeds_count_as_for_plain_tensors() -> None:
    def program() -> list[T]:
        torch.manual_seed(5)
        one, two = draw(), draw()
        torch.manual_seed(5)
        again = draw()
        state = torch.get_rng_state()
        three = draw()
        torch.set_rng_state(state)
        return [one, two, again, three, draw()]

    one, two, again, three, back = alike(simulate(program))
    assert not torch.equal(one, two)
    assert torch.equal(one, again) and torch.equal(three, back)


def test_unlike_seeds_and_draws_on_the_ranks_are_harmless() -> None:
    def program() -> list[T]:
        torch.manual_seed(get_rank())
        torch.rand(get_rank() + 1)
        whole = dtensor.randn(5, device_mesh=LINE, placements=[Replicate()])
        return [draw(), whole.to_local(), F.dropout(whole, 0.5).to_local()]

    alike(simulate(program))


def test_a_seed_gives_the_same_on_every_mesh_and_sends_nothing() -> None:
    def program(mesh: Any) -> list[T]:
        torch.manual_seed(100 + get_rank())
        dtensor.manual_seed(7, mesh)
        with count_collectives() as counts:
            made = [
                dtensor.rand(6, 2, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
                for _ in range(3)
            ]
            assert counts.calls() == 0
        after = torch.get_rng_state()
        torch.manual_seed(100 + get_rank())
        assert torch.equal(torch.get_rng_state(), after)  # torch's own is untouched
        return [m.full_tensor() for m in made]

    wanted = None
    for mesh in (init_device_mesh("cpu", (1,)), LINE, GRID):
        found = alike(simulate(program, ranks=mesh.size(), args=(mesh,)))
        wanted = wanted or found
        alike([wanted, found])
    assert wanted is not None and not torch.equal(wanted[0], wanted[1])


def test_a_seed_goes_by_the_ambient_mesh_and_ends_with_none() -> None:
    def program() -> list[T]:
        torch.manual_seed(1)
        before = draw()
        with LINE:
            dtensor.manual_seed(-1)
            one = draw()
            dtensor.manual_seed(2**64 - 1)  # as torch takes them
            two = draw()
            dtensor.manual_seed(None)
        torch.manual_seed(1)
        return [before, draw(), one, two]

    before, after, one, two = alike(simulate(program))
    assert torch.equal(before, after) and torch.equal(one, two)
    assert not torch.equal(before, one)


def test_unlike_seeds_given_to_us_are_refused_on_every_rank() -> None:
    def program() -> None:
        with pytest.raises(ValueError, match=r"manual_seed: the ranks must agree, got"):
            dtensor.manual_seed(3 if get_rank() else 4, LINE)
        with pytest.raises(ValueError, match=r"got \(seed, call\) \[None, \(1, 0\)"):
            dtensor.manual_seed(1 if get_rank() else None, LINE)
        with pytest.raises(TypeError, match="manual_seed: a seed is a whole number"):
            dtensor.manual_seed(0.5, LINE)  # type: ignore[arg-type]
        state = torch.tensor([1] * 24, dtype=torch.uint8)
        with pytest.raises(ValueError, match="set_rng_state: not a state, got bytes"):
            dtensor.set_rng_state(state, LINE)

    simulate(program)


def test_parts_of_a_mesh_have_seeds_of_their_own() -> None:
    """Stages of a pipeline, each on some of the ranks, do not repeat each other."""

    def program() -> list[list[T]]:
        dtensor.manual_seed(3, GRID)
        rows = GRID["tp"]
        own = [draw(rows), draw(rows)]
        shared = [draw(GRID)]
        dtensor.manual_seed(3, GRID)
        return [own, [draw(rows)], shared, [draw(GRID)]]

    found = simulate(program)
    alike([f[2] for f in found])
    for own, again, shared, shared_again in found:
        assert torch.equal(own[0], again[0])  # seeding the whole seeds its parts anew
        assert torch.equal(shared[0], shared_again[0])
        assert not torch.equal(own[0], own[1]) and not torch.equal(own[0], shared[0])
    alike([found[0][0], found[1][0]])
    assert not torch.equal(found[0][0][0], found[2][0][0])


@pytest.mark.parametrize("seeded", [False, True])
def test_a_state_is_saved_and_restored(seeded: bool) -> None:
    def program() -> list[T]:
        torch.manual_seed(get_rank())
        if seeded:
            dtensor.manual_seed(9, LINE)
        draw()
        file = io.BytesIO()
        torch.save(dtensor.get_rng_state(LINE), file)
        one = draw()
        if seeded:
            dtensor.manual_seed(1, LINE)
        draw()
        file.seek(0)
        dtensor.set_rng_state(torch.load(file), LINE)
        return [one, draw()]

    one, again = alike(simulate(program))
    assert torch.equal(one, again)


def test_a_seeded_state_serves_another_number_of_ranks() -> None:
    state = []

    def save() -> list[T]:
        dtensor.manual_seed(9, LINE)
        draw()
        state.append(dtensor.get_rng_state(LINE))
        return [draw()]

    pair = init_device_mesh("cpu", (2,))

    def go_on() -> list[T]:
        dtensor.set_rng_state(state[0], pair)
        return [draw(pair)]

    alike([alike(simulate(save)), alike(simulate(go_on, ranks=2))])


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_replays_its_numbers(seeded: bool, reentrant: bool) -> None:
    def program() -> list[T]:
        torch.manual_seed(get_rank())
        if seeded:
            dtensor.manual_seed(9, LINE)
        w = dtensor.ones(8, 6, device_mesh=LINE, placements=[Shard(0)])
        w.requires_grad_()
        masks: list[T] = []

        def block(x: T) -> T:
            noise = torch.bernoulli(torch.full_like(x, 0.5).detach())
            masks.append(noise.full_tensor())  # type: ignore[attr-defined]
            return F.dropout(x * noise, 0.5).sin()

        y = checkpoint(block, w * 1, use_reentrant=reentrant)
        after = draw()
        z = checkpoint(block, y, use_reentrant=reentrant)
        loss = (z + 3 * y).sum()
        state = dtensor.get_rng_state(LINE)
        loss.backward()
        # Recomputing leaves the numbers to come as they were.
        assert torch.equal(dtensor.get_rng_state(LINE), state)
        first, second = masks[:2]
        assert len(masks) == 4 and not torch.equal(first, second)
        assert torch.equal(masks[2], second) and torch.equal(masks[3], first)
        assert w.grad is not None
        return [w.grad.full_tensor(), y.full_tensor(), first, after]

    grad, y, first, _ = alike(simulate(program))
    # What was dropped, in forward and again in backward, has no gradient.
    assert torch.equal(grad != 0, y != 0)
    assert y[first == 0].eq(0).all() and 0 < y.count_nonzero() < 40


def test_forked_states_come_back() -> None:
    def program() -> list[T]:
        dtensor.manual_seed(2, LINE)
        with torch.random.fork_rng(devices=[]):
            one = draw()
        return [one, draw(), draw()]

    one, two, three = alike(simulate(program))
    assert torch.equal(one, two) and not torch.equal(two, three)


def test_a_generator_of_ones_own_counts() -> None:
    def program() -> list[T]:
        dtensor.manual_seed(2, LINE)
        g = torch.Generator().manual_seed(40 + get_rank())
        x = dtensor.zeros(5, 3, device_mesh=LINE, placements=[Shard(0)])
        calls = (
            lambda: x.uniform_(generator=g).full_tensor().clone(),
            lambda: torch.bernoulli(x + 0.5, generator=g).full_tensor(),
            lambda: torch.poisson(x * 9, g).full_tensor(),
            lambda: torch.multinomial(x + 1, 2, generator=g).full_tensor(),
        )
        x.fill_(0.25)
        made = [c() for c in calls[1:]] + [calls[0]()]
        g.manual_seed(40 + get_rank())
        x.fill_(0.25)
        return made + [c() for c in calls[1:]] + [calls[0]()]

    found = alike(simulate(program))
    alike([found[:4], found[4:]])


def test_the_example_of_the_page_runs() -> None:
    page = Path(__file__).parent.parent / "docs" / "randomness.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
    for block in blocks:
        exec(compile(block, "randomness.md", "exec"), {})
    assert len(blocks) == 1


def test_random_parameters_of_a_layer_do_not_depend_on_the_mesh() -> None:
    def program(mesh: Any) -> list[T]:
        dtensor.manual_seed(0, mesh)
        w = dtensor.empty(7, 5, device_mesh=mesh, placements=[Shard(0)] * mesh.ndim)
        torch.nn.init.kaiming_uniform_(w)
        b = dtensor.empty(7, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
        torch.nn.init.trunc_normal_(b)
        assert isinstance(w, DTensor)
        return [w.full_tensor(), b.full_tensor()]

    alike([alike(simulate(program, ranks=m.size(), args=(m,))) for m in (LINE, GRID)])
