"""The tutorial's Llama over MPI: run under mpiexec by tests/test_llama_mpi.py."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from llama import Args, Transformer, loss_of
from test_llama_tutorial import (
    check_gradients,
    close,
    serial_model,
    tokens_of,
    tutorial,
)

from dtensor import full_state_dict, get_rank, get_world_size, init_device_mesh


def trained() -> None:
    """Logits and gradients of the serial model, with uneven parts of the sequence."""
    serial = serial_model(Args())
    tokens, targets = tokens_of(2, 5)
    want = serial(tokens)
    loss_of(want, targets).backward()
    mesh = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("tp",))
    for typed in (False, True):
        model = copy.deepcopy(serial)
        model.zero_grad()
        got = tutorial(model, mesh, typed)(tokens)
        close(got, want)
        loss_of(got, targets).backward()
        check_gradients(serial, model)


def filled() -> None:
    """From meta by resetting; the whole state comes out on the first rank."""
    mesh = init_device_mesh("cpu", (get_world_size(),), mesh_dim_names=("tp",))
    with torch.device("meta"):
        model = Transformer(Args())
    tutorial(model, mesh, False).to_empty(device="cpu")
    torch.manual_seed(get_rank())  # unlike seeds: those of the first rank count
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    state = full_state_dict(model)
    assert bool(state) == (get_rank() == 0)
    everywhere = full_state_dict(model, rank0_only=False)
    copied = copy.deepcopy(everywhere)
    model.load_state_dict(everywhere)
    for name, value in full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, copied[name]), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    for check in sys.argv[1:]:
        globals()[check]()
        if get_rank() == 0:
            print(f"ok {check}", flush=True)
