"""Norms over whole and cut dims: layer, rms, group, batch, instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_harness import GRID, LINE, Case, assert_right, eighths, place, positive

from dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    count_collectives,
    redistribution,
    simulate,
)

T = torch.Tensor
A, CUBE = eighths(5, 6), eighths(3, 5, 6)
W, B = eighths(6, seed=1), eighths(6, seed=2)
IMAGE = eighths(4, 8, 3, 5)
GW, GB = eighths(8, seed=1), eighths(8, seed=2)


def layers() -> list[Case]:
    w2, b2 = eighths(5, 6, seed=1), eighths(5, 6, seed=2)
    return [
        Case("layer_norm", lambda x: F.layer_norm(x, (6,)), [A]),
        Case("layer_norm w", lambda x, w, b: F.layer_norm(x, (6,), w, b), [CUBE, W, B]),
        Case("layer_norm w only", lambda x, w: F.layer_norm(x, (6,), w), [A, W]),
        Case("layer_norm eps", lambda x: F.layer_norm(x, (6,), eps=0.5), [A]),
        Case(
            "layer_norm 2",
            lambda x, w, b: F.layer_norm(x, (5, 6), w, b),
            [CUBE, w2, b2],
        ),
        Case("layer_norm all", lambda x: F.layer_norm(x, (5, 6)), [A]),
        Case("layer_norm nothing", lambda x: F.layer_norm(x, (6,)), [eighths(0, 6)]),
        Case("rms_norm", lambda x: F.rms_norm(x, (6,)), [A]),
        Case("rms_norm w", lambda x, w: F.rms_norm(x, (6,), w), [CUBE, W]),
        Case("rms_norm 2", lambda x, w: F.rms_norm(x, (5, 6), w, 0.1), [CUBE, w2]),
        Case("layer_norm 3", lambda x: F.layer_norm(x, (3,)), [eighths(4, 3)]),
    ]


def groups() -> list[Case]:
    f = F.group_norm
    return [
        Case("group_norm 4", lambda x, w, b: f(x, 4, w, b), [IMAGE, GW, GB]),
        Case("group_norm 2", lambda x: f(x, 2), [IMAGE]),
        Case("group_norm 1", lambda x, w: f(x, 1, w, eps=0.25), [IMAGE, GW]),
        Case("group_norm 8", lambda x: f(x, 8), [IMAGE]),
        Case("group_norm line", lambda x: f(x, 3), [eighths(3, 6, 5)]),
        Case("group_norm flat", lambda x: f(x, 2), [eighths(5, 6)]),
    ]


def batches() -> list[Case]:
    rm, rv = eighths(8, seed=3), positive(8, seed=4)

    def trained(x: T, m: T, v: T, w: T, b: T) -> tuple[T, T, T]:
        m, v = m.detach().clone(), v.detach().clone()
        out = F.batch_norm(x, m, v, w, b, training=True, momentum=0.3, eps=0.1)
        return out, m, v

    def instance(x: T, m: T, v: T) -> tuple[T, T, T]:
        m, v = m.detach().clone(), v.detach().clone()
        return F.instance_norm(x, m, v, momentum=0.3), m, v

    def without(x: T) -> T:
        return F.batch_norm(x, None, None, training=True)

    return [
        Case("batch_norm", trained, [IMAGE, rm, rv, GW, GB], may_refuse=True),
        Case("batch_norm no stats", without, [IMAGE]),
        Case("batch_norm flat", without, [eighths(5, 6)]),
        Case("batch_norm line", without, [eighths(3, 5, 4)]),
        Case(
            "batch_norm eval",
            lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()),
            [IMAGE, rm, rv],
        ),
        Case(
            "batch_norm eval w",
            lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b),
            [IMAGE, rm, rv, GW, GB],
        ),
        Case("instance_norm", instance, [IMAGE, rm, rv], may_refuse=True),
        Case("instance_norm no stats", lambda x: F.instance_norm(x), [IMAGE]),
        Case(
            "instance_norm w",
            lambda x, w, b: F.instance_norm(x, weight=w, bias=b, eps=0.1),
            [IMAGE, GW, GB],
        ),
        Case(
            "instance_norm eval",
            lambda x, m, v: F.instance_norm(
                x, m.detach(), v.detach(), use_input_stats=False
            ),
            [IMAGE, rm, rv],
        ),
        Case("local_response_norm", lambda x: F.local_response_norm(x, 3), [IMAGE]),
    ]


def distances() -> list[Case]:
    y = eighths(5, 6, seed=5)
    return [
        Case("normalize", lambda x: F.normalize(x, dim=1), [A]),
        Case("normalize 3", lambda x: F.normalize(x, 3.0, 0), [A]),
        Case("cosine_similarity", F.cosine_similarity, [A, y]),
        Case("cosine 0", lambda x, z: F.cosine_similarity(x, z, dim=0), [A, y]),
        Case("cosine row", F.cosine_similarity, [A, eighths(1, 6)]),
        Case("pairwise_distance", F.pairwise_distance, [A, y]),
        Case("pairwise 1", lambda x, z: F.pairwise_distance(x, z, 1.0), [A, y]),
        Case(
            "pairwise keep",
            lambda x, z: F.pairwise_distance(x, z, keepdim=True),
            [CUBE, eighths(5, 6)],
        ),
        Case("cdist", torch.cdist, [A, eighths(3, 6, seed=6)]),
        Case("cdist 1", lambda x, z: torch.cdist(x, z, 1.0), [CUBE, eighths(3, 2, 6)]),
        Case("cdist row", torch.cdist, [CUBE, eighths(1, 2, 6)]),
    ]


FAMILIES: dict[str, Callable[[], list[Case]]] = {
    "layers": layers,
    "groups": groups,
    "batches": batches,
    "distances": distances,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_axis(family: str) -> None:
    assert_right(FAMILIES[family](), LINE, limit=6)


@pytest.mark.parametrize("family", FAMILIES)
def test_on_two_axes(family: str) -> None:
    assert_right(FAMILIES[family](), GRID, limit=4)


def test_norms_send_moments() -> None:
    """Nothing of the operand's size is sent, and no operand is moved."""

    def program() -> list[int]:
        sent = []
        x = place(eighths(64, 16, 32), LINE, (Shard(2),))
        y = place(eighths(64, 16, 32), LINE, (Shard(0),))
        runs: list[Callable[[], Any]] = [
            lambda: F.layer_norm(x, (32,)),
            lambda: F.rms_norm(x, (32,)),
            lambda: F.group_norm(x, 4),
            lambda: F.batch_norm(x, None, None, training=True),
            lambda: F.batch_norm(y, None, None, training=True),
            lambda: F.instance_norm(x),
        ]
        with redistribution("error"):
            for run in runs:
                with count_collectives() as c:
                    run()
                assert c.calls() == 1
                sent.append(int(c.bytes()))
        return sent

    number, others = 8, 3
    rows = 64 * 16
    for sent in simulate(program, ranks=4):
        assert sent[0] <= 3 * rows * number * others
        assert sent[1] <= 2 * rows * number
        assert sent[2] <= 3 * 64 * 4 * number * others
        assert sent[3] == sent[4] <= 3 * 16 * number * others
        assert sent[5] <= 3 * rows * number * others


def test_running_statistics_stay_where_they_are() -> None:
    """A module in training: the batch is cut, its buffers are those of one process."""

    def program() -> None:
        torch.manual_seed(0)
        norm, twin = torch.nn.BatchNorm2d(8).double(), torch.nn.BatchNorm2d(8).double()
        for name, t in [*norm.named_parameters(), *norm.named_buffers()]:
            whole = place(t.detach(), LINE, (Replicate(),))
            if name in dict(norm.named_parameters()):
                setattr(norm, name, torch.nn.Parameter(whole))
            else:
                setattr(norm, name, whole)
        for step in range(3):
            x = eighths(6, 8, 2, 2, seed=step)
            got, want = norm(place(x, LINE, (Shard(step),))), twin(x)
            torch.testing.assert_close(got.full_tensor(), want)
        for name, t in twin.named_buffers():
            own = getattr(norm, name)
            assert isinstance(own, DTensor) and own.placements == (Replicate(),)
            torch.testing.assert_close(own.full_tensor(), t)

    simulate(program, ranks=4)


def test_running_statistics_cannot_be_addends() -> None:
    def program() -> None:
        x = place(IMAGE, LINE, (Shard(0),))
        m, v = (place(positive(8), LINE, (Replicate(),)) for _ in range(2))
        m = DTensor.from_local(m.to_local(), LINE, [Partial("max")], run_check=False)
        with pytest.raises(ShardingError, match="running statistics are written"):
            F.batch_norm(x, m, v, training=True)

    simulate(program, ranks=4)


def test_one_value_per_channel_is_an_error_everywhere() -> None:
    def program() -> None:
        x = place(eighths(1, 8), LINE, (Shard(1),))
        with pytest.raises(ValueError, match="more than 1 value"):
            F.batch_norm(x, None, None, training=True)

    simulate(program, ranks=4)


def test_a_large_mean_costs_no_digits() -> None:
    """In float32, deviations of 1 around a million."""

    def program() -> None:
        x = (eighths(8, 64) + 1e6).float()
        got = place(x, LINE, (Shard(1),)).var(1).full_tensor()
        torch.testing.assert_close(got, x.var(1), rtol=1e-5, atol=0)

    simulate(program, ranks=4)
