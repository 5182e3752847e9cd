"""Styles: how modules are laid out over a mesh, and ``parallelize_module``."""

from dtensor.styles.data_parallel import DataParallel
from dtensor.styles.distribute import distribute_module
from dtensor.styles.fully_shard import fully_shard
from dtensor.styles.heads import FusedColwise, FusedQKV
from dtensor.styles.loading import full_state_dict
from dtensor.styles.parallelize import layout_of, parallelize_module
from dtensor.styles.precision import MixedPrecision
from dtensor.styles.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from dtensor.styles.replicate import ReplicateParallel
from dtensor.styles.sampler import ShardSampler
from dtensor.styles.sequence_parallel import SequenceParallel
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
    "FusedColwise",
    "FusedQKV",
    "Layout",
    "MixedPrecision",
    "ParallelStyle",
    "Port",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateParallel",
    "Rowwise",
    "RowwiseParallel",
    "SequenceParallel",
    "ShardSampler",
    "distribute_module",
    "full_state_dict",
    "fully_shard",
    "layout_of",
    "parallelize_module",
]
