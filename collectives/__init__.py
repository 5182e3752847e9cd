"""Collectives between ranks: communicators, differentiable verbs, simulated ranks."""

from dtensor.collectives.communicator import CollectiveError, Communicator
from dtensor.collectives.conjugate import all_reduce_identity, identity_all_reduce
from dtensor.collectives.counter import count_collectives
from dtensor.collectives.dry import dry_run
from dtensor.collectives.functional import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    permute,
    reduce_scatter,
)
from dtensor.collectives.reductions import REDUCTIONS, Reduction
from dtensor.collectives.registry import communicator, communicator_of
from dtensor.collectives.simulate import simulate

__all__ = [
    "REDUCTIONS",
    "CollectiveError",
    "Communicator",
    "Reduction",
    "all_gather",
    "all_reduce",
    "all_reduce_identity",
    "all_to_all",
    "broadcast",
    "communicator",
    "communicator_of",
    "count_collectives",
    "dry_run",
    "identity_all_reduce",
    "permute",
    "reduce_scatter",
    "simulate",
]
