"""A small GPT, written as if there were one process.

Nothing here knows of meshes: no process group, no rank, no size divided by the number
of ranks. ``plan_for`` in train_lm.py is all that lays it out, from outside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Args:
        vocab: Number of different characters.
        context: Characters the model sees at once.
        dim: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads of a block; divides ``dim``.
        dropout: Share of activations dropped in training.
    """

    vocab: int
    context: int = 128
    dim: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.dim % self.heads:
            raise ValueError(
                f"Config: heads must divide dim, got dim {self.dim} and heads "
                f"{self.heads}. Take Config(dim={self.heads * 32}, "
                f"heads={self.heads}, ...)."
            )


class Attention(nn.Module):
    """Causal self-attention.

    One linear makes queries, keys and values, head by head: its output features
    are ordered (head, [q, k, v], channel). A column split of it over a mesh axis
    therefore gives whole heads to every rank.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        # -1 counts the heads: all of them, or this rank's where x is local.
        qkv = self.qkv(x).view(b, t, -1, 3 * self.head_dim)  # (B, T, H, 3D)
        q, k, v = qkv.transpose(1, 2).chunk(3, dim=-1)  # (B, H, T, D)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        y = y.transpose(1, 2).reshape(b, t, -1)  # (B, T, C)
        out: Tensor = self.out(y)
        return out


class FeedForward(nn.Module):
    """Two linears with a GELU between them, four times as wide inside."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.dim, 4 * config.dim)
        self.down = nn.Linear(4 * config.dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention, then feed-forward, each on a normalised copy of the stream."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class GPT(nn.Module):
    """Characters in, a score for every next character out."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        self.apply(self._initialise)
        # Every block adds to the stream twice; this keeps its variance near one.
        for name, p in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                with torch.no_grad():
                    p.mul_((2 * config.layers) ** -0.5)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        # A small model that sees few steps learns to look one character back
        # much sooner from this than from the usual 0.02 of large ones.
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next character at every position.

        Args:
            tokens: (B, T) integer codes, ``T`` at most ``config.context``.

        Returns:
            (B, T, vocab) logits.
        """
        at = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(at)  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))  # (B, T, V)
        return logits


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next characters, in nats."""
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
