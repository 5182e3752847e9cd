"""Pictures of who holds what: text, tables, images; slices of any dims."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
import torch

from dtensor import (
    BlockCyclic,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    simulate,
    visualize_sharding,
)

R = Replicate()
HEAD = "on DeviceMesh('cpu', (2, 2))"


def values(*shape: int) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.arange(torch.Size(shape).numel()).view(shape)


def test_pictures() -> None:
    def program() -> tuple[str, ...]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(values(4, 6), mesh, [Shard(0), R])
        cyclic = distribute_tensor(values(4), mesh, [BlockCyclic(0, 1), Partial()])
        cube = distribute_tensor(values(2, 3, 4), mesh, [Shard(0), Shard(2)])
        page = visualize_sharding(x)._repr_html_()
        assert page.count("<td") == 2 and "0,1" in page
        assert "\x1b[30;48" in str(visualize_sharding(x, color=True))
        with pytest.raises(ValueError, match="dims or indices do not fit"):
            visualize_sharding(cube, dims=(0, 1), at=(9,))
        return (
            str(visualize_sharding(x, color=False)),
            str(visualize_sharding(cyclic, color=False)),
            str(visualize_sharding(cube, dims=(1, 2), at=(1,), color=False)),
            str(visualize_sharding(x.sum(), color=False)),
        )

    grid, cyclic, cube, scalar = simulate(program, 4)[0]
    assert grid.splitlines() == [
        f"(4, 6) placed (S(0), R) {HEAD}",
        "     0:6",
        "0:2  0,1",
        "2:4  2,3",
    ]
    assert cyclic.splitlines() == [
        f"(4) placed (Cyclic(0: 1), P) {HEAD}".replace("(4)", "(4,)"),
        "0:1  0,1",
        "1:2  2,3",
        "2:3  0,1",
        "3:4  2,3",
    ]
    assert cube.splitlines() == [
        f"(2, 3, 4) placed (S(0), S(2)) {HEAD}, dim 0 at 1",
        "     0:2  2:4",
        "0:3   2    3",
    ]
    assert scalar.splitlines() == [f"() placed (P, R) {HEAD}", "  0-3"]


def test_images() -> None:
    """Blocks as large as their stretches, a stripe for each rank that holds one."""

    def program() -> tuple[str, str, int]:
        mesh = init_device_mesh("cpu", (2, 2))
        x = distribute_tensor(values(3, 6), mesh, [Shard(0), R])
        picture = visualize_sharding(x)
        assert picture._repr_svg_() == picture.svg()
        wide = visualize_sharding(x).svg(width=900)
        return picture.svg(), wide, len(picture.panels)

    image, wide, panels = simulate(program, 4)[0]
    assert panels == 1
    root = ET.fromstring(image)  # well-formed
    ns = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in root.iter(f"{ns}text")]
    assert texts == [
        f"(3, 6) placed (S(0), R) {HEAD}",
        "0:6",
        "0:2",
        "0,1",
        "2:3",
        "2,3",
    ]
    rects = [r.attrib for r in root.iter(f"{ns}rect")]
    stripes = [r for r in rects if r["stroke"] == "none"]
    assert len({r["fill"] for r in stripes}) == len(stripes) == 4
    blocks = [r for r in rects if r["stroke"] == "black"]
    tall, short = (float(b["height"]) for b in blocks)
    assert tall == pytest.approx(2 * short, rel=1e-3)
    assert 'width="900"' in wide


def test_every_slice_of_more_dims() -> None:
    def program() -> tuple[str, str, str, int]:
        mesh = init_device_mesh("cpu", (2, 2))
        cube = distribute_tensor(values(4, 3, 2, 4), mesh, [Shard(3), Shard(0)])
        long = distribute_tensor(values(40, 2, 2), mesh, [BlockCyclic(0, 1), R])
        many = visualize_sharding(long, dims=(1, 2), color=False)
        assert "and 24 more" in many._repr_html_() and "and 24 more" in many.svg()
        some = visualize_sharding(cube, color=False)
        assert some.svg().count("dim 2 at 0:2, dim 3 at") == 2
        assert some._repr_html_().count("<table>") == 2
        empty = visualize_sharding(distribute_tensor(values(0, 3, 0), mesh, [R, R]))
        return str(some), str(many).splitlines()[-1], str(empty), len(many.panels)

    some, rest, empty, count = simulate(program, 4)[0]
    assert some.splitlines() == [
        f"(4, 3, 2, 4) placed (S(3), S(0)) {HEAD}",
        "dim 2 at 0:2, dim 3 at 0:2",
        "     0:3",
        "0:2   0",
        "2:4   1",
        "dim 2 at 0:2, dim 3 at 2:4",
        "     0:3",
        "0:2   2",
        "2:4   3",
    ]
    assert rest == "and 24 more; see dims= and at=" and count == 16
    assert empty.startswith(f"(0, 3, 0) placed (R, R) {HEAD}")
