"""What SGLang 0.5.23 calls of `sgl_kernel` when it serves a text model on a CPU without AMX, in eager torch.

Names and arguments are SGLang's. Shapes: T tokens of all sequences in a row, N sequences, S slots of the state pool,
Hk and Hv heads of keys and values, K and V their sizes, D channels, W taps of the convolution. Sequence n has the rows
`cu_seqlens[n]` to `cu_seqlens[n + 1]` and the slot `indices[n]`; a negative slot is padding. States are kept in float32
or as the pool has them, and updated in place. All but the first serve the gated-delta-net layers of the Qwen3.5/3.6
family, whose recurrence is equation 10 of Yang et al., Gated Delta Networks (2024).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_length: int,
) -> None:
    """Write each request's new cache places, in a row in `out_cache_loc`, to its line of `req_to_token`."""
    done = 0
    starts, ends = start_offset.tolist(), end_offset.tolist()
    for request, start, end in zip(req_pool_indices.tolist(), starts, ends, strict=True):
        places = out_cache_loc[done : done + end - start]
        req_to_token[request, start:end] = places.to(req_to_token.dtype)
        done += end - start


def sequences(cu_seqlens: Tensor, indices: Tensor) -> Iterator[tuple[int, slice, int]]:
    """Yield (n, rows, slot) of every sequence that has rows and is no padding."""
    bounds = cu_seqlens.tolist()
    for n, slot in enumerate(indices.tolist()):
        if slot >= 0 and bounds[n + 1] > bounds[n]:
            yield n, slice(bounds[n], bounds[n + 1]), slot


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Divide by the Euclidean norm along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over one sequence: q and k [T, Hv, K], v [T, Hv, V], log decay g and beta [T, Hv].

    Returns the outputs [T, Hv, V] and the state [Hv, K, V] after the last token.
    """
    outputs = torch.empty_like(v)
    for t in range(len(q)):
        state = state * g[t].exp()[:, None, None]
        correction = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * beta[t][:, None]
        state = state + k[t][:, :, None] * correction[:, None, :]
        outputs[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return outputs, state


def run_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor,
    cu_seqlens: Tensor,
) -> Tensor:
    """Run all sequences on their slots of `pool` [S, Hv, V, K]: q, k [1, T, Hk, K], v [1, T, Hv, V] -> [1, T, Hv, V]."""
    repeats = v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5
    q, k = (unit_length(x[0].float()).repeat_interleave(repeats, dim=1) for x in (q, k))
    values, g, beta = v[0].float(), g.float(), beta.float()
    out = torch.zeros_like(values)
    for _, rows, slot in sequences(cu_seqlens, indices):
        state = pool[slot].float().transpose(-1, -2)
        out[rows], state = delta_rule(
            q[rows] * scale, k[rows], values[rows], g[rows], beta[rows], state
        )
        pool[slot] = state.transpose(-1, -2).to(pool.dtype)
    return out.unsqueeze(0).to(v.dtype)


def fused_gdn_gating_cpu(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the log decay and the step size, both float32 [1, T, Hv]; A_log, dt_bias [Hv], a, b [T, Hv]."""
    log_decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return log_decay.unsqueeze(0), b.float().sigmoid().unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """Prefill: g and beta [1, T, Hv], the other shapes as in `run_delta_rule`; the states are written back in place."""
    out = run_delta_rule(q, k, v, g[0], beta[0], initial_state, initial_state_indices, cu_seqlens)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
    **speculative: object,
) -> Tensor:
    """Decode, one token a sequence: a, b [T, Hv], the other shapes as in `run_delta_rule`.

    Raises NotImplementedError for the arguments of speculative decoding.
    """
    if speculative:
        raise NotImplementedError("The CPU stand-in has no speculative decoding on hybrid models.")
    heads = v.shape[2]
    g, beta = fused_gdn_gating_cpu(A_log, a.reshape(-1, heads), b.reshape(-1, heads), dt_bias)
    return run_delta_rule(
        q, k, v, g[0], beta[0], initial_state_source, initial_state_indices, cu_seqlens
    )


def activated(x: Tensor, activation: str | None) -> Tensor:
    """Apply SiLU where `activation` says so."""
    return F.silu(x) if activation in ("silu", "swish") else x


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str | None,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: object,
) -> Tensor:
    """Prefill's convolution: x [D, T], weight [D, W], states [S, D, W - 1] -> [D, T]; has_initial_state [N]."""
    channels, taps = weight.shape
    filters = weight.float().unsqueeze(1)
    offsets = None if bias is None else bias.float()
    out = torch.zeros_like(x)
    for n, rows, slot in sequences(query_start_loc, cache_indices):
        before = conv_states[slot].float() * has_initial_state[n]
        window = torch.cat([before, x[:, rows].float()], dim=1)
        filtered = F.conv1d(window.unsqueeze(0), filters, offsets, groups=channels)[0]
        out[:, rows] = activated(filtered, activation).to(x.dtype)
        conv_states[slot] = window[:, 1 - taps :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """Decode's convolution: x [N, D], states [S, D, W - 1], weight [D, W] -> [N, D]."""
    slots = conv_state_indices.long()
    window = torch.cat([conv_state[slots].float(), x.float().unsqueeze(-1)], dim=-1)
    filtered = (window * weight.float()).sum(-1)
    if bias is not None:
        filtered = filtered + bias.float()
    conv_state[slots] = window[..., 1:].to(conv_state.dtype)
    return activated(filtered, activation).to(x.dtype)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm along the last axis whose weight is kept as a difference from one."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Norm queries and keys head by head: [T, heads * head_dim] -> [T * heads, head_dim]."""
    return (
        gemma_rms_norm(q.reshape(-1, head_dim), q_weight, eps),
        gemma_rms_norm(k.reshape(-1, head_dim), k_weight, eps),
    )


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same where each head of `q_gate` [T, heads * 2 * head_dim] is its query, then its output gate."""
    q, gate = q_gate.reshape(len(q_gate), num_heads, 2 * head_dim).chunk(2, dim=-1)
    q, k = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return q, k, gate.reshape(-1, head_dim).contiguous()


def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiply `x` by the sigmoid of `gate`, in place."""
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    qkvz: Tensor, ba: Tensor, k_heads: int, v_heads: int, k_dim: int, v_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Split the two input projections into qkv [T, 2*Hk*K + Hv*V], z [T, Hv, V], b and a [T, Hv]."""
    value_width = v_heads * v_dim
    qkv, z = torch.split(qkvz, [2 * k_heads * k_dim + value_width, value_width], dim=-1)
    b, a = torch.split(ba, [v_heads, v_heads], dim=-1)
    z = z.reshape(-1, v_heads, v_dim)
    return qkv.contiguous(), z.contiguous(), b.contiguous(), a.contiguous()


def gated_rms_norm(norm: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
    """Forward of SGLang's gated RMSNorm module: without AMX its own is a Triton kernel, beside which lies this reference."""
    from sglang.kernels.ops.attention.fla.layernorm_gated import rms_norm_ref

    out: Tensor = rms_norm_ref(
        x,
        norm.weight,
        norm.bias,
        z=z,
        eps=norm.eps,
        group_size=norm.group_size,
        norm_before_gate=norm.norm_before_gate,
    )
    return out


MODULES: dict[str, list[Callable[..., Any]]] = {
    "sgl_kernel": [assign_req_to_token_pool_cpu],
    "sgl_kernel.mamba": [
        causal_conv1d_fn_cpu,
        causal_conv1d_update_cpu,
        chunk_gated_delta_rule_cpu,
    ],
}

OPERATORS: list[Callable[..., Any]] = [
    fused_gdn_gating_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_sigmoid_mul_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
]
