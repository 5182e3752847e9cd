"""A distributed tensor runtime: DTensors over MPI and NCCL, with torch's own autograd."""

import dtensor.devices
import dtensor.grad_scaler
import dtensor.hooks
import dtensor.interop
import dtensor.rules.resolve
from dtensor import lifecycle
from dtensor.block_cyclic import BlockCyclic
from dtensor.clipping import clip_grad_norm_
from dtensor.collectives.communicator import CollectiveError
from dtensor.collectives.counter import count_collectives
from dtensor.collectives.dry import dry_run
from dtensor.collectives.simulate import simulate
from dtensor.custom_placement import CustomPlacement
from dtensor.errors import ShardingError
from dtensor.explain import calibrate, explain
from dtensor.factories import (
    arange,
    empty,
    full,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from dtensor.leaves import no_grad_sync
from dtensor.local_map import local_map
from dtensor.loss_parallel import loss_parallel
from dtensor.losses import cross_entropy
from dtensor.mesh.ambient import current_mesh, use_mesh
from dtensor.mesh.device_mesh import DeviceMesh, init_device_mesh
from dtensor.mesh.world import get_rank, get_world_size
from dtensor.picture import visualize_sharding
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.policy import RedistributionWarning, promote_plain, redistribution
from dtensor.ragged import RaggedShard
from dtensor.random import get_rng_state, manual_seed, set_rng_state
from dtensor.replicas import ReplicaError, check_replicas
from dtensor.rules.table import register_rule
from dtensor.sections import Sections
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
from dtensor.tensor import DTensor, distribute_tensor

lifecycle.install()

__all__ = [
    "BlockCyclic",
    "CollectiveError",
    "Colwise",
    "ColwiseParallel",
    "CustomPlacement",
    "DTensor",
    "DataParallel",
    "DeviceMesh",
    "FusedColwise",
    "FusedQKV",
    "Layout",
    "MixedPrecision",
    "ParallelStyle",
    "Partial",
    "Placement",
    "Port",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RaggedShard",
    "RedistributionWarning",
    "ReplicaError",
    "Replicate",
    "ReplicateParallel",
    "Rowwise",
    "RowwiseParallel",
    "Sections",
    "SequenceParallel",
    "Shard",
    "ShardSampler",
    "ShardingError",
    "arange",
    "calibrate",
    "check_replicas",
    "clip_grad_norm_",
    "count_collectives",
    "cross_entropy",
    "current_mesh",
    "distribute_module",
    "distribute_tensor",
    "dry_run",
    "empty",
    "explain",
    "full",
    "full_state_dict",
    "fully_shard",
    "get_rank",
    "get_rng_state",
    "get_world_size",
    "init_device_mesh",
    "layout_of",
    "local_map",
    "loss_parallel",
    "manual_seed",
    "no_grad_sync",
    "ones",
    "parallelize_module",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribution",
    "promote_plain",
    "register_rule",
    "set_rng_state",
    "simulate",
    "use_mesh",
    "visualize_sharding",
    "zeros",
]

dtensor.interop.install()
