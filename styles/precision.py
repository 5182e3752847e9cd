"""Which dtype is computed in, summed in and handed on, beside the one that is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """Dtypes of a fully sharded unit; see ``fully_shard``.

    The shards, which the optimizer updates, stay as they are (float32, say). They are
    cast before they are gathered, so that half of the bytes travel, and gradients are
    summed over the ranks in ``reduce_dtype`` and added to the shard's dtype.

    Args:
        param_dtype: Dtype of gathered floating parameters. None: that of the shards.
        reduce_dtype: Dtype in which gradients are summed. None: that of the gradients.
        output_dtype: Dtype of floating tensors that come out of the module. None: left.
        cast_forward_inputs: Cast floating tensors that come in to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = torch.bfloat16
    reduce_dtype: torch.dtype | None = torch.float32
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, torch.dtype) or not value.is_floating_point:
                raise TypeError(
                    f"MixedPrecision: {name} is not a floating dtype, got {value!r}. "
                    f"Write for example {name}=torch.bfloat16, or None."
                )
