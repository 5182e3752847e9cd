"""The verbs on simulated ranks: values, transposes, second derivatives, counts."""

from __future__ import annotations

import doctest
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from dtensor.collectives.communicator import CollectiveError, Communicator
from dtensor.collectives.conjugate import all_reduce_identity, identity_all_reduce
from dtensor.collectives.counter import count_collectives
from dtensor.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    reduce_scatter,
)
from dtensor.collectives.reductions import REDUCTIONS
from dtensor.collectives.registry import communicator, communicator_of
from dtensor.collectives.simulate import simulate
from dtensor.mesh.chunks import chunk_sizes
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import get_rank, get_world_size

Tensor = torch.Tensor
Verb = Callable[[Tensor, Communicator], Tensor]
Serial = Callable[[list[Tensor]], list[Tensor]]

# torch itself scripts the functions that forward mode decomposes, when it first runs.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

SIZES = [1, 2, 3, 4, 6]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
SHORT = [torch.float8_e4m3fn, torch.float8_e5m2]


def line(n: int) -> DeviceMesh:
    return init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))


def values(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)


def check(n: int, verb: Verb, serial: Serial, shape: Callable[[int], Any]) -> None:
    """Values, unchanged inputs, adjoint, second derivative and forward mode.

    The truth is ``serial``, the verb as a function of the list of all ranks' tensors,
    under plain autograd: what the ranks compute is the derivative of the sum of their
    losses.
    """
    inputs = [values(shape(r), r) for r in range(n)]

    def program() -> tuple[Tensor, ...]:
        rank, comm = get_rank(), communicator(line(n))
        x = inputs[rank].clone().requires_grad_()
        y = verb(x, comm)
        assert type(y) is Tensor
        assert torch.equal(x.detach(), inputs[rank])
        with torch.no_grad():
            quiet = verb(x, comm)
        assert not quiet.requires_grad
        assert torch.equal(quiet, y.detach())
        c = values(y.shape, 100 + rank)
        (back,) = torch.autograd.grad(y, x, c, retain_graph=True)
        loss = (y**3 * c).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        w = values(x.shape, 200 + rank)
        (h,) = torch.autograd.grad((g**2 * w).sum(), x)
        return y.detach(), c, back, g.detach(), w, h

    def tangent(w: Tensor) -> Tensor:
        dual = forward_ad.make_dual(inputs[get_rank()], w)
        push = forward_ad.unpack_dual(verb(dual, communicator(line(n)))).tangent
        assert push is not None
        return push

    results = simulate(program, ranks=n)
    ys, cs, backs, gs, ws, hs = zip(*results, strict=True)
    with forward_ad.dual_level():  # one for the process: torch has it so
        pushes = simulate(lambda: tangent(ws[get_rank()]), ranks=n)

    xs = [x.clone().requires_grad_() for x in inputs]
    truth = serial(xs)
    for y, t in zip(ys, truth, strict=True):
        torch.testing.assert_close(y, t.detach(), rtol=1e-13, atol=1e-13)
    forward = sum(float((y * c).sum()) for y, c in zip(ys, cs, strict=True))
    backward = sum(float((x * b).sum()) for x, b in zip(inputs, backs, strict=True))
    assert math.isclose(forward, backward, rel_tol=1e-11, abs_tol=1e-11)
    losses = [(t**3 * c).sum() for t, c in zip(truth, cs, strict=True)]
    true_gs = torch.autograd.grad(torch.stack(losses).sum(), xs, create_graph=True)
    seconds = [(g**2 * w).sum() for g, w in zip(true_gs, ws, strict=True)]
    true_hs = torch.autograd.grad(torch.stack(seconds).sum(), xs, retain_graph=True)
    pushed = serial(list(ws))
    for got, want in ((gs, true_gs), (hs, true_hs), (pushes, pushed)):
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-11, atol=1e-11)


# --------------------------------------------------------------------- one test a verb
@pytest.mark.parametrize("shape", [(3, 2), (), (0, 4)])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("n", SIZES)
def test_all_reduce(n: int, op: str, shape: tuple[int, ...]) -> None:
    def serial(xs: list[Tensor]) -> list[Tensor]:
        total = torch.stack(xs).sum(0)
        return [total / n if op == "avg" else total] * n

    check(n, lambda x, c: all_reduce(x, c, op), serial, lambda r: shape)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_all_gather(n: int, given: bool, dim: int) -> None:
    sizes = [(2 * r + 1) % 4 for r in range(n)]
    sizes[-1] = 0

    def shape(rank: int) -> list[int]:
        shape = [2, 3, 2]
        shape[dim] = sizes[rank]
        return shape

    check(
        n,
        lambda x, c: all_gather(x, c, dim, sizes if given else None),
        lambda xs: [torch.cat(xs, dim)] * n,
        shape,
    )


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_reduce_scatter(n: int, given: bool, op: str, dim: int) -> None:
    sizes = [(2 * r + 1) % 4 for r in range(n)] if given else list(chunk_sizes(5, n))
    shape = [2, 3, 2]
    shape[dim] = sum(sizes)

    def serial(xs: list[Tensor]) -> list[Tensor]:
        total = torch.stack(xs).sum(0) / (n if op == "avg" else 1)
        return list(total.split(sizes, dim))

    def verb(x: Tensor, c: Communicator) -> Tensor:
        return reduce_scatter(x, c, dim, sizes if given else None, op)

    check(n, verb, serial, lambda r: shape)


@pytest.mark.parametrize(("split", "concat"), [(0, 1), (1, 0), (2, 1), (-1, 0)])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_all_to_all_moves_a_shard(n: int, given: bool, split: int, concat: int) -> None:
    whole = [3, 5, 4]
    cut, parts = chunk_sizes(whole[split], n), chunk_sizes(whole[concat], n)

    def shape(rank: int) -> list[int]:
        shape = list(whole)
        shape[concat] = parts[rank]
        return shape

    sizes = (cut, parts) if given else (None, None)
    check(
        n,
        lambda x, c: all_to_all(x, c, split, concat, *sizes),
        lambda xs: list(torch.cat(xs, concat).split(list(cut), split)),
        shape,
    )


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("n", SIZES)
def test_all_to_all_with_any_lengths(n: int, given: bool, dim: int) -> None:
    lengths = [[(3 * i + j) % 3 for j in range(n)] for i in range(n)]

    def shape(rank: int) -> list[int]:
        shape = [2, 2]
        shape[dim] = sum(lengths[rank])
        return shape

    def serial(xs: list[Tensor]) -> list[Tensor]:
        pieces = [x.split(lengths[i], dim) for i, x in enumerate(xs)]
        return [torch.cat([pieces[i][j] for i in range(n)], dim) for j in range(n)]

    def verb(x: Tensor, c: Communicator) -> Tensor:
        coming = [lengths[i][c.rank] for i in range(n)] if given else None
        return all_to_all(x, c, dim, dim, lengths[c.rank], coming)

    check(n, verb, serial, shape)


@pytest.mark.parametrize("shape", [(3, 2), (), (0,)])
@pytest.mark.parametrize("n", SIZES)
def test_broadcast(n: int, shape: tuple[int, ...]) -> None:
    root = n - 1
    check(
        n,
        lambda x, c: broadcast(x, c, root),
        # the zero keeps the others, whose values do not matter, in the graph
        lambda xs: [xs[root] + 0 * torch.stack(xs).sum(0)] * n,
        lambda r: shape,
    )


@pytest.mark.parametrize("shift", [1, -1, 2, 0, 7])
@pytest.mark.parametrize("n", SIZES)
def test_permute(n: int, shift: int) -> None:
    check(
        n,
        lambda x, c: permute(x, c, shift),
        lambda xs: [xs[(r - shift) % n] for r in range(n)],
        lambda r: (2, 3),
    )


@pytest.mark.parametrize("n", SIZES)
def test_the_conjugates_count_a_replicated_loss_once(n: int) -> None:
    """f and g around a split product, up to second derivatives, against one process."""
    x0, a0, b0 = values((2, 3), 1), values((3, 12), 2), values((12, 3), 3)

    def loss(y: Tensor) -> Tensor:
        return (y**3).sum()

    def program() -> tuple[Tensor, ...]:
        comm = communicator(line(n))
        x = x0.clone().requires_grad_()
        a = a0.chunk(n, 1)[comm.rank].clone().requires_grad_()
        b = b0.chunk(n, 0)[comm.rank].clone().requires_grad_()
        y = all_reduce_identity((identity_all_reduce(x, comm) @ a).tanh() @ b, comm)
        (g,) = torch.autograd.grad(loss(y), x, create_graph=True)
        h = torch.autograd.grad((g**2).sum(), (x, a, b))
        return y.detach(), g.detach(), h[0], h[1], h[2]

    x, a, b = (t.clone().requires_grad_() for t in (x0, a0, b0))
    y = (x @ a).tanh() @ b
    (g,) = torch.autograd.grad(loss(y), x, create_graph=True)
    h = torch.autograd.grad((g**2).sum(), (x, a, b))
    for rank, got in enumerate(simulate(program, ranks=n)):
        truth = (y, g, h[0], h[1].chunk(n, 1)[rank], h[2].chunk(n, 0)[rank])
        for one, other in zip(got, truth, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-11, atol=1e-11)


def test_identity_all_reduce_is_a_view_and_sends_nothing() -> None:
    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        with count_collectives() as c:
            y = identity_all_reduce(x, line(2))
            assert y.data_ptr() == x.data_ptr()
            assert identity_all_reduce(x.detach(), line(2)).data_ptr() == x.data_ptr()
        assert c.calls() == 0

    simulate(program, ranks=2)


# --------------------------------------------------------------- what is passed in
def test_strided_inputs() -> None:
    base = torch.arange(24.0).view(4, 6)
    views = [base.t(), base[:, ::2], base[1:3, 1:], base.expand(2, 4, 6), base[0, 0]]

    def program() -> None:
        mesh = line(2)
        for view in views:
            doubled = all_reduce(view, mesh)
            assert torch.equal(doubled, 2 * view)
            assert doubled.is_contiguous()
            assert torch.equal(broadcast(view, mesh), view)
            assert torch.equal(permute(view, mesh, 1), view)
            for dim in range(view.ndim):
                joined = all_gather(view, mesh, dim)
                assert torch.equal(joined, torch.cat([view, view], dim))
                assert joined.is_contiguous()
                piece = reduce_scatter(view, mesh, dim)
                mine = (2 * view).split(list(chunk_sizes(view.shape[dim], 2)), dim)
                assert torch.equal(piece, mine[get_rank()])

    simulate(program, ranks=2)


def test_lazy_conjugates_and_negatives() -> None:
    z = torch.complex(values((3,), 0), values((3,), 1))

    def program() -> None:
        mesh = line(2)
        assert torch.equal(all_gather(z.conj(), mesh)[:3], z.conj())
        assert torch.equal(all_reduce(z.conj().imag, mesh), 2 * z.conj().imag)

    simulate(program, ranks=2)
    assert torch.equal(communicator(line(1)).all_reduce(z.conj()), z.conj())


def test_a_gather_along_dim_0_makes_no_second_copy() -> None:
    class Spy:
        rank, size, ranks, axis = 0, 2, (0, 1), "tp"
        given = taken = 0

        def all_gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
            out = torch.cat([x.view(-1), x.view(-1)])
            self.given, self.taken = x.data_ptr(), out.data_ptr()
            return out

    spy: Any = Spy()
    x = torch.ones(2, 3)
    out = all_gather(x, spy, 0, [2, 2])
    assert (x.data_ptr(), out.data_ptr()) == (spy.given, spy.taken)
    x = torch.ones(1, 4, 3)
    out = all_gather(x, spy, 1, [4, 4])
    assert (x.data_ptr(), out.data_ptr()) == (spy.given, spy.taken)


def test_subclasses_are_stripped_in_forward_and_backward() -> None:
    class Wrapped(torch.Tensor):
        pass

    def program() -> None:
        mesh = line(2)
        leaf = torch.nn.Parameter(torch.ones(3))
        y = all_reduce(leaf, mesh)
        assert type(y) is Tensor
        typed = torch.ones(3).as_subclass(Wrapped)
        y.backward(typed)
        assert leaf.grad is not None
        assert leaf.grad.tolist() == [2.0] * 3
        assert type(all_gather(typed, mesh)) is Tensor

    simulate(program, ranks=2)


# ------------------------------------------------------------------------------ dtypes
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, *UNSIGNED, *SHORT])
def test_reductions_in_every_dtype(dtype: torch.dtype) -> None:
    n = 4
    inputs = [torch.tensor([1, 2, r, 3 - r]).to(dtype) for r in range(n)]
    real = torch.stack([x.to(torch.float64) for x in inputs])
    truth = {"sum": real.sum(0), "max": real.amax(0), "min": real.amin(0)}
    truth["product"] = real.prod(0)
    if dtype.is_floating_point:
        truth["avg"] = real.mean(0)

    def program() -> dict[str, Tensor]:
        comm = communicator(line(n))
        return {op: comm.all_reduce(inputs[comm.rank], op) for op in truth}

    for result in simulate(program, ranks=n):
        for op, want in truth.items():
            assert result[op].dtype is dtype
            assert torch.equal(result[op].to(torch.float64), want.to(dtype).double())


@pytest.mark.parametrize("dtype", [*INTEGERS, *UNSIGNED, torch.bool])
def test_bitwise_reductions(dtype: torch.dtype) -> None:
    bits = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0]])
    folds = {"band": bits[0] & bits[1], "bor": bits[0] | bits[1]}
    folds |= {"bxor": bits[0] ^ bits[1], "max": folds["bor"], "min": folds["band"]}

    def program() -> None:
        x = bits[get_rank()].to(dtype)
        for op, want in folds.items():
            got = all_reduce(x, line(2), op)
            assert got.dtype is dtype
            assert torch.equal(got.to(torch.int64), want)

    simulate(program, ranks=2)


def test_the_ends_of_unsigned_ranges() -> None:
    big = {torch.uint16: 2**16 - 1, torch.uint32: 2**32 - 1, torch.uint64: 2**64 - 1}

    def program() -> None:
        for dtype, top in big.items():
            x = torch.tensor([top, 1] if get_rank() else [0, top], dtype=dtype)
            assert all_reduce(x, line(2), "max").tolist() == [top, top]
            assert all_reduce(x, line(2), "min").tolist() == [0, 1]
            assert all_reduce(x, line(2), "sum").tolist() == [top, 0]

    simulate(program, ranks=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *SHORT])
@pytest.mark.parametrize("op", ["sum", "avg"])
def test_short_floats_are_rounded_once(dtype: torch.dtype, op: str) -> None:
    n = 4
    # Added one at a time in dtype, each small addend would be lost.
    inputs = [torch.tensor([4 / torch.finfo(dtype).eps if r == 0 else 1.5])
              for r in range(n)]  # fmt: skip
    inputs = [x.clamp(max=torch.finfo(dtype).max / 4).to(dtype) for x in inputs]
    want = torch.stack([x.float() for x in inputs]).sum(0)
    want = (want / n if op == "avg" else want).to(dtype)

    def program() -> tuple[Tensor, Tensor]:
        x = inputs[get_rank()]
        every = x.repeat(n)
        return all_reduce(x, line(n), op), reduce_scatter(every, line(n), op=op)

    for result in simulate(program, ranks=n):
        for got in result:
            assert torch.equal(got.float(), want.float())


def test_complex_sums() -> None:
    def program() -> None:
        for dtype in (torch.complex64, torch.complex128):
            x = torch.tensor([1 + 2j, 3j], dtype=dtype)
            assert torch.equal(all_reduce(x, line(2)), 2 * x)
            assert torch.equal(all_reduce(x, line(2), "avg"), x)
            assert torch.equal(all_reduce(x, line(2), "product"), x * x)

    simulate(program, ranks=2)


MOVED = [*FLOATS, *INTEGERS, *UNSIGNED, *SHORT, torch.bool, torch.complex64]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [*MOVED, torch.complex128, torch.complex32])
def test_moves_in_every_dtype(dtype: torch.dtype) -> None:
    source = torch.arange(64, dtype=torch.uint8)[: 2 * dtype.itemsize]
    if dtype is torch.bool:
        source = source % 2
    x = source.view(dtype)

    def program() -> None:
        mesh = line(2)
        for got in (
            all_gather(x, mesh)[2:],
            broadcast(x, mesh, 1),
            permute(x, mesh, 1),
            all_to_all(torch.cat([x, x]), mesh, 0, 0, (2, 2), (2, 2))[:2],
        ):
            assert got.dtype is dtype
            assert torch.equal(got.view(torch.uint8), source)

    simulate(program, ranks=2)


def test_nan_and_signed_zero_are_alike_on_all_ranks() -> None:
    def program() -> Tensor:
        x = torch.tensor([math.nan, 0.0, 1.0] if get_rank() == 1 else [1.0, -0.0, 2.0])
        return torch.stack([all_reduce(x, line(3), op) for op in ("max", "min")])

    results = simulate(program, ranks=3)
    assert results[0][:, 0].isnan().all()
    for result in results:
        assert torch.equal(result.view(torch.int32), results[0].view(torch.int32))


def test_identities_change_nothing() -> None:
    for op, row in REDUCTIONS.items():
        if op == "avg":
            continue
        for dtype in (torch.float32, torch.int8, torch.uint8, torch.bool):
            if dtype.is_floating_point and op in ("band", "bor", "bxor"):
                continue
            if dtype is torch.bool and op in ("sum", "product"):
                continue
            x = torch.tensor([0, 1, 1]).to(dtype)
            neutral = torch.full_like(x, row.identity(dtype))
            assert torch.equal(row.function(x, neutral), x), (op, dtype)


# ---------------------------------------------------------------------------- refusals
def refused(kind: type[Exception], text: str, fn: Callable[[], object]) -> None:
    with pytest.raises(kind, match=text):
        fn()


def test_reductions_that_make_no_sense_are_refused() -> None:
    comm = communicator(line(1))
    yes, whole, real = torch.tensor([True]), torch.tensor([1]), torch.tensor([1.0])
    for op in ("sum", "avg", "product"):
        with pytest.raises(TypeError, match=f"got '{op}' for bool"):
            comm.all_reduce(yes, op)
    refused(TypeError, "got 'avg' for int64", lambda: comm.all_reduce(whole, "avg"))
    refused(TypeError, "got 'bor' for float32", lambda: comm.all_reduce(real, "bor"))
    z = torch.tensor([1j])
    refused(TypeError, "'max' for complex64", lambda: comm.all_reduce(z, "max"))
    text = "no such reduction, got 'mean', expected one of sum, avg"
    refused(ValueError, text, lambda: comm.all_reduce(real, "mean"))
    refused(ValueError, text, lambda: comm.reduce_scatter(real, [1], "mean"))


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_reductions_without_adjoint_refuse_gradients(op: str) -> None:
    x = torch.ones(2, requires_grad=True)
    text = f"has no adjoint, got '{op}' .* Pass x.detach"
    refused(ValueError, text, lambda: all_reduce(x, line(1), op))
    refused(ValueError, text, lambda: reduce_scatter(x, line(1), op=op))
    assert all_reduce(x.detach(), line(1), op).tolist() == [1.0, 1.0]
    with torch.no_grad():
        all_reduce(x, line(1), op)


def test_arguments_that_do_not_fit_are_refused() -> None:
    comm, x = communicator(line(1)), torch.ones(2, 3)
    refused(ValueError, r"elements of x: got 6", lambda: comm.all_gather(x, [5]))
    refused(ValueError, r"counts do not fit", lambda: comm.all_gather(x, [3, 3]))
    refused(ValueError, r"elements of x: got 6", lambda: comm.reduce_scatter(x, [5]))
    refused(ValueError, r"own stretch", lambda: comm.all_to_all(x, [6], [5]))
    refused(ValueError, r"root is not a position", lambda: comm.broadcast(x, 1))
    refused(ValueError, r"dest is not a position", lambda: comm.permute(x, -1, 0, 6))
    refused(
        ValueError, r"count without a source", lambda: comm.permute(x, None, None, 1)
    )
    refused(ValueError, r"sends to itself", lambda: comm.permute(x, 0, None, 0))
    refused(ValueError, r"count from itself", lambda: comm.permute(x, 0, 0, 5))
    refused(ValueError, r"no such dim, got 2", lambda: all_gather(x, comm, 2))
    refused(ValueError, r"reshape\(1\) first", lambda: all_gather(x.sum(), comm))
    refused(ValueError, r"sizes does not fit", lambda: all_gather(x, comm, 0, [3]))
    refused(ValueError, r"sizes do not fit", lambda: all_gather(x, comm, 0, [1, 1]))
    refused(ValueError, r"sum of sizes", lambda: reduce_scatter(x, comm, 0, [3]))
    refused(ValueError, r"split_sizes", lambda: all_to_all(x, comm, 0, 1, [3]))
    refused(ValueError, r"concat_sizes", lambda: all_to_all(x, comm, 0, 1, [2], [4]))
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    refused(
        ValueError, r"runs over one axis, got DeviceMesh", lambda: all_reduce(x, grid)
    )
    sparse = x.to_sparse()
    text = "no plain buffer, got layout torch.sparse_coo"
    refused(TypeError, text, lambda: _two(lambda c: c.all_reduce(sparse)))
    refused(TypeError, text, lambda: _two(lambda c: c.broadcast(sparse, 0)))
    refused(TypeError, "not a tensor, got float", lambda: all_reduce(1.0, grid))  # type: ignore[arg-type]


def _two(fn: Callable[[Communicator], object]) -> list[object]:
    return simulate(lambda: fn(communicator(line(2))), ranks=2)


def test_torch_func_transforms_are_refused() -> None:
    x = torch.ones(3)
    text = "no values to send inside torch.func"
    refused(
        TypeError, text, lambda: torch.func.vmap(lambda v: all_reduce(v, line(1)))(x)
    )
    refused(
        TypeError,
        text,
        lambda: torch.func.grad(lambda v: all_reduce(v, line(1)).sum())(x),
    )


# -------------------------------------------------------- ranks that do not fit together
@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (
            lambda c: c.all_reduce(
                torch.ones(2, dtype=[torch.int32, torch.int64][c.rank])
            ),
            ["the ranks disagree", "dtype int32", "dtype int64"],
        ),
        (
            lambda c: c.all_reduce(torch.ones(2 + c.rank)),
            ["shape (2,), dtype", "shape (3,), dtype"],
        ),
        (
            lambda c: c.all_reduce(torch.ones(2), ["sum", "max"][c.rank]),
            ["op sum", "op max"],
        ),
        (
            lambda c: (c.barrier if c.rank else lambda: c.all_reduce(torch.ones(1)))(),
            ["barrier on axis 'tp'", "all_reduce on axis 'tp'"],
        ),
        (
            lambda c: c.broadcast(torch.ones(2), c.rank),
            ["root 0", "root 1"],
        ),
        (
            lambda c: c.all_gather(torch.ones(1), [1, 1 + c.rank][:: 1 - 2 * c.rank]),
            ["counts (1, 1)", "counts (2, 1)"],
        ),
        (
            lambda c: c.all_to_all(torch.ones(2), [1, 1], [1, 1] if c.rank else [1, 2]),
            ["rank 1 sends 1 elements to rank 0, which expects 2"],
        ),
        (
            lambda c: c.permute(torch.ones(2), 1 - c.rank, 1 - c.rank, 2 + c.rank),
            ["rank 1 expects 3 elements from rank 0, which sends 2 to 1"],
        ),
        (
            lambda c: c.permute(torch.ones(2), 1 - c.rank, None, 0),
            ["rank 0 sends to rank 1, which does not receive from it"],
        ),
        (
            lambda c: c.permute(torch.ones(2), None, 1 - c.rank, 2),
            ["which sends 2 to nobody"],
        ),
    ],
)
def test_mismatches_name_both_sides(program: Any, texts: list[str]) -> None:
    with pytest.raises(CollectiveError) as caught:
        _two(program)
    for text in [*texts, "rank 1", "axis 'tp'", "call 1", "shape", "dtype"]:
        assert text in str(caught.value)


def test_the_error_carries_its_call() -> None:
    with pytest.raises(CollectiveError) as caught:
        _two(lambda c: [c.barrier(), c.all_reduce(torch.ones(2 + c.rank, 4))])
    error = caught.value
    assert isinstance(error, RuntimeError)
    # rank 1 came last to the barrier, so it went on first; rank 0 met its call
    assert (error.rank, error.axis, error.verb) == (0, "tp", "all_reduce")
    assert (error.sequence, error.shape, error.dtype) == (2, (2, 4), torch.float32)


# ---------------------------------------------------------------------- communicators
def test_axes_over_the_same_ranks_share_a_channel() -> None:
    grid = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp", "tp"))

    def program() -> None:
        tp, again = communicator(grid, "tp"), communicator(grid, 2)
        assert again.ranks == tp.ranks == grid.axis_ranks("tp")
        assert communicator(grid["tp"]) is communicator(grid["tp"], "tp") is tp
        other: Any = communicator(grid["tp"].flatten("other"))
        assert other.axis == "other"
        assert other._channel is tp._channel  # type: ignore[attr-defined]
        assert communicator(grid, "pp").size == 1

    simulate(program, ranks=4)


def test_positions_follow_the_mesh_not_the_world() -> None:
    mesh = DeviceMesh("cpu", [3, 1, 0, 2], mesh_dim_names=("tp",))

    def program() -> tuple[list[int], int]:
        mine = torch.tensor([get_rank()])
        return all_gather(mine, mesh).tolist(), int(broadcast(mine, mesh, 0))

    assert simulate(program, ranks=4) == [([3, 1, 0, 2], 3)] * 4


def test_subsets_leave_the_others_alone() -> None:
    mesh = DeviceMesh("cpu", [0, 2])

    def program() -> float | None:
        if mesh.coordinate is None:
            return None
        return float(all_reduce(torch.tensor(1.0 + get_rank()), mesh))

    assert simulate(program, ranks=4) == [4.0, None, 4.0, None]


def test_communicators_are_for_members_of_a_world_that_has_them() -> None:
    with pytest.raises(
        ValueError, match=r"the world is too small, got 1 ranks, expect"
    ):
        communicator(line(3))
    with pytest.raises(
        ValueError, match=r"only members .* got rank 0, expected one of"
    ):
        communicator_of((1, 2), "tp")
    with pytest.raises(ValueError, match="not on the mesh"):
        communicator(DeviceMesh("cpu", [1, 2]))


def test_objects_travel_as_copies() -> None:
    def program() -> list[Any]:
        mine = {"rank": get_rank(), "data": "x" * get_rank() * 1000}
        got = communicator(line(get_world_size())).all_gather_object(mine)
        assert got[get_rank()] == mine
        assert got[get_rank()] is not mine
        return [len(entry["data"]) for entry in got]

    for n in SIZES:
        assert simulate(program, ranks=n) == [[1000 * r for r in range(n)]] * n


def test_a_world_of_one_copies() -> None:
    comm, x = communicator(line(1)), torch.ones(2, 3).t()
    for y in (
        comm.all_reduce(x),
        comm.broadcast(x, 0),
        comm.all_gather(x, [6]).view(3, 2),
        comm.reduce_scatter(x, [6]).view(3, 2),
        comm.all_to_all(x, [6], [6]).view(3, 2),
        comm.permute(x, 0, 0, 6).view(3, 2),
    ):
        assert torch.equal(y, x)
        assert y.is_contiguous()
        assert y.data_ptr() != x.data_ptr()
    assert comm.permute(x, None, None, 0).shape == (0,)
    assert comm.all_gather_object("a") == ["a"]
    comm.barrier()


def test_permute_with_open_ends() -> None:
    def program(comm: Communicator) -> list[float]:
        x = torch.full((2,), float(comm.rank))
        if comm.rank == 0:
            return comm.permute(x, 1, None, 0).tolist()
        return comm.permute(x, None, 0, 2).tolist()

    assert _two(program) == [[], [0.0, 0.0]]


# --------------------------------------------------------------------------- counting
def test_calls_and_bytes_by_verb_and_axis() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def program() -> None:
        x = torch.ones(3, dtype=torch.float32, requires_grad=True)
        with count_collectives() as outer:
            y = all_reduce(x, grid["tp"])
            with count_collectives() as inner:
                y.sum().backward()
                assert inner.calls("all_reduce") == 1
            all_gather(x.detach(), grid["dp"], sizes=[3, 3])
            reduce_scatter(torch.ones(5), grid["dp"])
            all_to_all(torch.ones(4, 2), grid["dp"], 0, 1, None, (2, 2))
            broadcast(torch.ones(4), grid["dp"])
            permute(torch.ones(4), grid["dp"], 1)
            permute(torch.ones(4), grid["dp"], 2)
            communicator(grid, "dp").barrier()
        assert inner.rows() == {("all_reduce", "tp"): (1, 12)}
        assert outer.rows() == {
            ("all_reduce", "tp"): (2, 24),
            ("all_gather", "dp"): (1, 12),
            ("reduce_scatter", "dp"): (1, 10),
            ("all_to_all", "dp"): (1, 16),
            ("broadcast", "dp"): (1, 8),
            ("permute", "dp"): (2, 16),
            ("barrier", "dp"): (1, 0),
        }
        assert (outer.calls(), outer.bytes()) == (9, 86)
        assert outer.calls("all_reduce", "dp") == 0
        assert outer.calls(axis="dp") == 7
        assert outer.bytes("all_reduce", "tp") == 24

    simulate(program, ranks=4)


def test_the_table() -> None:
    def program() -> str:
        with count_collectives() as c:
            all_reduce(torch.ones(1024), line(2))
            all_gather(torch.ones(2), line(2))
        all_reduce(torch.ones(2), line(2))
        return c.table()

    table = (
        "verb        axis  calls  bytes sent\n"
        "all_reduce  tp        1       4,096\n"
        "all_gather  tp        2          16\n"
        "total                 3       4,112"
    )
    assert simulate(program, ranks=2) == [table, table]


def test_exchanging_lengths_is_one_call_and_can_be_spared() -> None:
    def program() -> tuple[int, int]:
        with count_collectives() as asked:
            all_gather(torch.ones(2), line(2))
        with count_collectives() as told:
            all_gather(torch.ones(2), line(2), sizes=(2, 2))
        return asked.calls(), told.calls()

    assert simulate(program, ranks=2) == [(2, 1), (2, 1)]


@pytest.mark.parametrize("name", ["conjugate", "counter", "functional", "simulate"])
def test_examples_run(name: str) -> None:
    done = doctest.testmod(importlib.import_module(f"dtensor.collectives.{name}"))
    assert done.failed == 0
    assert done.attempted > 0
