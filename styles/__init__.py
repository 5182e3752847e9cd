"""Styles: how modules are laid out over a mesh, and ``parallelize_module``."""

from dtensor.styles.data_parallel import DataParallel
from dtensor.styles.parallelize import layout_of, parallelize_module
from dtensor.styles.style import Layout, ParallelStyle, Port
from dtensor.styles.tensor_parallel import (
    Colwise,
    ColwiseParallel,
    Rowwise,
    RowwiseParallel,
)

__all__ = [
    "Colwise",
    "ColwiseParallel",
    "DataParallel",
    "Layout",
    "ParallelStyle",
    "Port",
    "Rowwise",
    "RowwiseParallel",
    "layout_of",
    "parallelize_module",
]
