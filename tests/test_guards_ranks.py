"""Guards of DESIGN section 1: what must be alike on all ranks, or reach the base."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from guard_helpers import gen, lay, leaves, line, ranks, same

from dtensor import (
    Replicate,
    Shard,
    count_collectives,
    get_rank,
    init_device_mesh,
    redistribution,
)

ILLEGAL: dict[str, Any] = {
    "matmul": lambda x: x @ x,
    "view": lambda x: x.view(7),
    "dim": lambda x: x.sum(5),
    "broadcast": lambda x: x + lay(gen(3), Replicate()),
    "amax of nothing": lambda x: x[:, :0].amax(1),
    "index": lambda x: x[9],
    "cat": lambda x: torch.cat([x, lay(gen(1, 7), Replicate())]),
    "dtype": lambda x: x.sum(dtype=torch.float32).long() % x.softmax(0).bool() << "a",
}


@pytest.mark.parametrize("name", ILLEGAL)
@ranks(2)
def test_s1_2_illegal_calls_raise_on_all_ranks_before_anything_moves(
    name: str,
) -> None:
    """1.2: legality is judged on the spec: both ranks raise, though one is empty."""
    x = lay(gen(1, 4), Shard(0))
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError)) as raised:
        ILLEGAL[name](x)
    texts = line()  # the ranks are still in step:
    posts: list[Any] = x._spec.comm(0).all_gather_object(type(raised.value).__name__)
    assert posts[0] == posts[1] and texts is x.device_mesh


EMPTY: dict[str, Any] = {
    "amax": lambda x: x.amax(0),
    "amin all": lambda x: x.amin(),
    "max": lambda x: x.max(),
    "max dim": lambda x: x.max(0).values,
    "argmax": lambda x: x.argmax(0),
    "argmin all": lambda x: x.argmin(),
    "median": lambda x: x.median(0).values,
    "median all": lambda x: x.median(),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(0),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(1),
    "softmax": lambda x: x.softmax(0),
    "all": lambda x: (x > -9).all(),
    "topk": lambda x: x.topk(1, 0).values,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EMPTY)
@ranks(3)
def test_s1_2_empty_shards_contribute_the_identity(name: str) -> None:
    """1.2: two of three ranks hold no row."""
    v = -gen(1, 4).abs()  # negative, so that a zero from an empty shard would show
    x, xr = lay(v, Shard(0), mesh=line(3)).requires_grad_(), v.requires_grad_()
    y, want = EMPTY[name](x), EMPTY[name](xr)
    same(y, want)
    if want.is_floating_point():
        y.sum().backward()
        want.sum().backward()
        same(x.grad, xr.grad)


@ranks(2)
def test_s1_2_backward_from_another_thread() -> None:
    """1.2: backward reads no contextvar: it runs in a thread that has none set."""
    (x, w), (xr, wr) = leaves([gen(4, 3), gen(3)], [Shard(0), Replicate()])
    mesh2 = init_device_mesh("cpu", (1,), mesh_dim_names=("other",))
    y = (x @ w).redistribute(Replicate()).square().sum()
    y.register_hook(lambda g: g * 1)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            y.backward()
        except BaseException as e:  # noqa: BLE001 - shown below
            failed.append(e)

    with mesh2, redistribution("error"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert not failed, failed
    (xr @ wr).square().sum().backward()
    same(x.grad, xr.grad)
    same(w.grad, wr.grad)


VIEWS: dict[str, Any] = {
    "row": lambda x: x[1],
    "slice": lambda x: x[1:3],
    "column": lambda x: x[:, 1],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "t": lambda x: x.t(),
    "view": lambda x: x.view(2, 2, 4),
    "flatten": lambda x: x.view(-1),
    "split": lambda x: x.split(3)[0],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "expand": lambda x: x[:, :1].expand(4, 2)[:, 0],
    "diagonal": lambda x: x.diagonal(),
    "data": lambda x: x.data,
    "data of a row": lambda x: x[1].data,
    "detach of a column": lambda x: x[:, 1].detach(),
    "row of columns": lambda x: x[:, 1:][1],
    "same dtype": lambda x: x[1:].to(torch.float64),
    "detach": lambda x: x.detach(),
    "unfold": lambda x: x.unfold(0, 2, 2),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", VIEWS)
@ranks(2)
def test_s1_2_a_write_through_a_view_reaches_its_base_or_is_refused(
    name: str, place: Any
) -> None:
    """1.2: never a silent write into a gathered copy."""
    x, xr = lay(gen(4, 4), place), gen(4, 4)
    VIEWS[name](xr).mul_(2).add_(1)
    try:
        VIEWS[name](x).mul_(2).add_(1)
    except ValueError as e:
        assert "cannot reach the base" in str(e) or "in place" in str(e), e
        same(x, gen(4, 4))
    else:
        same(x, xr)


@ranks(2)
def test_s1_2_setitem_reaches_the_tensor() -> None:
    """1.2: x[index] = value writes the shard in place, or is refused and writes none."""
    for place in (Shard(0), Shard(1), Replicate()):
        x, xr = lay(gen(4, 4), place), gen(4, 4)
        at = x.data_ptr()
        done = 0
        for index in (1, (slice(None), 2), (slice(1, 3), slice(1, None)), slice(None)):
            try:
                x[index] = 5.0
            except ValueError as e:
                assert re.search(r"setitem_?: in place.*redistribute", str(e)), e
            else:
                xr[index] = 5.0
                done += 1
        assert x.data_ptr() == at and done >= (4 if place == Replicate() else 2)
        same(x, xr)


@ranks(2)
def test_s1_2_repr_and_reading_grad_never_communicate() -> None:
    """1.2: on one rank alone, and Partial gradients as well."""
    x = lay(gen(4), Replicate()).requires_grad_()
    y = (x * lay(gen(4), Shard(0))).sum()
    y.retain_grad()
    y.backward()
    with count_collectives() as c:
        if get_rank() == 0:
            texts = [repr(x), str(y), repr(x.grad), f"{x!r}", repr(y.grad), f"{x}"]
            assert all(t.startswith("DTensor(shape=") for t in texts)
            assert x.grad.placements == (Replicate(),)
    assert c.calls() == 0
    same(x.grad, gen(4))
