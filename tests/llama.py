"""A Llama-style model as a user of one process writes it; nothing here knows of meshes.

The names are those that PyTorch's tutorial on tensor parallelism speaks of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Args:
    """Sizes; the defaults are small enough for tests."""

    dim: int = 16
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 4
    vocab: int = 20
    hidden: int = 24
    max_seq: int = 16


def rotations(head_dim: int, length: int, base: float = 10000.0) -> Tensor:
    """Unit complex numbers by position and channel pair: (T, D/2)."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float64), base**-steps)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Turn pairs of channels: (B, T, H, D) by (T, D/2)."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))  # (B, T, H, D/2)
    turned = pairs * by.view(1, by.shape[0], 1, by.shape[1])
    return torch.view_as_real(turned).flatten(3)


def repeat_heads(x: Tensor, times: int) -> Tensor:
    """Each head of keys or values as often as queries share it."""
    if times == 1:
        return x
    b, t, heads, d = x.shape
    wide = x[:, :, :, None, :].expand(b, t, heads, times, d)
    return wide.reshape(b, t, heads * times, d)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


class Attention(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = args.n_heads, args.n_kv_heads
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        b, t, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(b, t, self.n_heads, self.head_dim)
        xk = xk.view(b, t, self.n_kv_heads, self.head_dim)
        xv = xv.view(b, t, self.n_kv_heads, self.head_dim)
        xq, xk = rotate(xq, freqs_cis), rotate(xk, freqs_cis)
        times = self.n_heads // self.n_kv_heads
        keys, values = repeat_heads(xk, times), repeat_heads(xv, times)
        y = F.scaled_dot_product_attention(
            xq.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
        )  # (B, H, T, D)
        y = y.transpose(1, 2).contiguous().view(b, t, -1)
        out: Tensor = self.wo(y)
        return out


class FeedForward(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden, bias=False)
        self.w2 = nn.Linear(args.hidden, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim)
        self.ffn_norm = RMSNorm(args.dim)

    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module):
    def __init__(self, args: Args) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(args.vocab, args.dim)
        self.layers = nn.ModuleList(
            TransformerBlock(args) for _ in range(args.n_layers)
        )
        self.norm = RMSNorm(args.dim)
        self.output = nn.Linear(args.dim, args.vocab, bias=False)
        freqs = rotations(args.dim // args.n_heads, args.max_seq)
        self.register_buffer("freqs_cis", freqs, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        freqs_cis = self.freqs_cis[: tokens.shape[1]]  # type: ignore[index]
        for layer in self.layers:
            h = layer(h, freqs_cis)
        logits: Tensor = self.output(self.norm(h))
        return logits


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of next tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
