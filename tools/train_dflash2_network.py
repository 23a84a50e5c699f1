"""A DFlash 2 draft in PyTorch, for many blocks of many rows at once; names of tensors are the published draft's.

Source: Chen et al., DFlash (arXiv 2602.06036), and the released DFlash 2 draft's layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_dflash2_shape import Shape
from tools.train_dflash2_target import rotate, rotation


class Norm(nn.Module):
    """RMS norm with a gain, in the type of what it norms."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Conv(nn.Module):
    """Convolution within a block, around a part of a layer; it starts as one that changes nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.taps, self.group = shape.conv_taps, shape.conv_group
        base = torch.zeros(2, shape.conv_taps, shape.hidden)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(
            shape.hidden, 2 * shape.conv_taps * (shape.hidden // shape.conv_group), bias=False
        )
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, u: Tensor) -> Tensor:
        """Of the part's normed input `[..., block, hidden]`, factors `[..., block, 2, taps, hidden / group, 1]`."""
        return self.kernel_projection(u).unflatten(-1, (2, self.taps, -1, 1))

    def forward(self, x: Tensor, kernels: Tensor, side: int) -> Tensor:
        """The part's input (side 0) or output (1); rows before a block's first count as 0."""
        rows = x.shape[-2]
        base = self.base_kernel[side].unflatten(-1, (-1, self.group)).to(x.dtype)
        grouped = x.unflatten(-1, (-1, self.group))
        total = torch.zeros_like(grouped)
        for tap in range(min(self.taps, rows)):
            earlier = functional.pad(grouped, (0, 0, 0, 0, tap, 0))[..., :rows, :, :]
            total = total + (base[tap] + kernels[..., side, tap, :, :]) * earlier
        return total.flatten(-2)


class Attention(nn.Module):
    """Queries of blocks over their own keys and those of the context before each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, context: Tensor, turns: Tensor, context_turns: Tensor, mask: Tensor) -> Tensor:
        """Rows of all blocks `[B, n, hidden]`; `mask` `[n, T + n]` says which of context and rows each sees."""
        both = torch.cat([context, x], 1)
        q = rotate(self._heads(self.q_norm, self.q_proj(x)), turns)
        k = rotate(self._heads(self.k_norm, self.k_proj(both)), torch.cat([context_turns, turns], 1))
        v = self._heads(None, self.v_proj(both))
        k, v = (part.repeat_interleave(self.shape.heads // self.shape.kv_heads, 1) for part in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (-1, self.shape.head_dim))
        return (split if norm is None else norm(split)).transpose(1, 2)


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each between convolutions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.attention_conv = Conv(shape)
        self.mlp_conv = Conv(shape)
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, context: Tensor, turns: Tensor, context_turns: Tensor, mask: Tensor) -> Tensor:
        """Blocks `[B, A, block, hidden]` to the same."""
        u = self.input_layernorm(x)
        kernels = self.attention_conv.kernels(u)
        rows = self.attention_conv(u, kernels, 0).flatten(1, 2)
        y = self.self_attn(rows, context, turns, context_turns, mask)
        x = x + self.attention_conv(y.view_as(x), kernels, 1)
        u = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(u)
        return x + self.mlp_conv(self.mlp(self.mlp_conv(u, kernels, 0)), kernels, 1)


class Selector(nn.Module):
    """What a token's score gains by the token before it; it starts as one that changes nothing."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(0.3 * torch.randn(shape.vocab, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(shape.vocab, shape.rank))
        self.hidden_projection = nn.Linear(shape.hidden, shape.rank, bias=False)

    def keys(self, states: Tensor, before: Tensor) -> Tensor:
        """`[n, rank]` of states `[n, hidden]` and the tokens before: times a token's successor row, its gain."""
        return self.hidden_projection(states) * functional.embedding(before, self.predecessor_codebook)


class Draft(nn.Module):
    """The whole draft but for table and head, which are the target's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = Norm(shape.hidden, shape.eps)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        self.candidate_selector = Selector(shape)

    def forward(self, taps: Tensor, anchors: Tensor, rows: Tensor) -> Tensor:
        """Taps `[B, T, n · hidden]` and blocks of embeddings `[B, A, block, hidden]` behind positions before `anchors`
        `[A]`, the same in all rows, to final-normed states like the blocks.
        """
        shape, positions = self.shape, torch.arange(taps.shape[1], device=taps.device)
        places = (anchors[:, None] + torch.arange(rows.shape[2], device=taps.device)).flatten()
        context = self.hidden_norm(self.fc(taps))
        turns, context_turns = (rotation(where, shape.head_dim, shape.theta) for where in (places, positions))
        mask = visible(shape, anchors, rows.shape[2], taps.shape[1])
        x = rows
        for layer in self.layers:
            x = layer(x, context, turns, context_turns, mask)
        return self.norm(x)

    @torch.no_grad()
    def walk(self, states: Tensor, anchor: Tensor, head: Tensor) -> Tensor:
        """The likeliest tokens `[n, block − 1]` of blocks' states `[n, block, hidden]`, one after another."""
        selector, before, found = self.candidate_selector, anchor, []
        for row in states[:, 1:].unbind(1):
            values, tokens = functional.linear(row, head).float().topk(min(self.shape.top_k, len(head)), -1)
            gains = functional.embedding(tokens, selector.successor_codebook) @ selector.keys(row, before)[..., None]
            best = (values + gains.squeeze(-1)).argmax(-1, keepdim=True)
            before = tokens.gather(1, best).squeeze(1)
            found.append(before)
        return torch.stack(found, 1)


def visible(shape: Shape, anchors: Tensor, block: int, length: int) -> Tensor:
    """Which of `length` positions and of all blocks' rows each of these rows sees, `[A · block, length + A · block]`.

    Of the context what is before the anchor and within the window, of the rows those of its own block.
    """
    row = torch.arange(block, device=anchors.device).repeat(len(anchors))
    start = anchors.repeat_interleave(block)
    of = torch.arange(len(anchors), device=anchors.device).repeat_interleave(block)
    positions = torch.arange(length, device=anchors.device)
    context = (positions < start[:, None]) & ((start + row)[:, None] - positions < shape.window)
    own = of[:, None] == of
    if shape.causal:
        own &= row[:, None] >= row
    return torch.cat([context, own], 1)


def embed(shape: Shape, table: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Blocks of embeddings `[B, A, block, hidden]` whose first rows are the tokens at the anchors, of rows `[B, T]`."""
    first = functional.embedding(tokens[:, anchors].long(), table)[:, :, None]
    return torch.cat([first, table[shape.mask].expand(*first.shape[:2], shape.block - 1, -1)], 2)


def count(parameters: Sequence[Tensor]) -> int:
    """Numbers in all of them."""
    return sum(parameter.numel() for parameter in parameters)
