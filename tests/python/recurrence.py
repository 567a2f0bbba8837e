"""The oracle of the Python tests: every operator token by token in float64, written with autograd's own operations."""

import torch


def _gates(g, g_gamma, A_log, dt_bias, gate, lower_bound, per_channel):
    """Log decays [B, T, HV, 1 or K]."""
    total = None
    if g is not None:
        total = g
        if gate != "log_decay":
            rate = A_log.exp()
            bias = (0 if dt_bias is None
                    else dt_bias.reshape(g.shape[2:]) if per_channel and dt_bias.numel() > g.shape[2]
                    else dt_bias.reshape(-1, *[1] * (g.dim() - 3)))
            rate = rate.reshape(-1, *[1] * (g.dim() - 3))
            if gate == "softplus":
                total = -rate * torch.nn.functional.softplus(g + bias)
            else:
                total = lower_bound * torch.sigmoid(rate * (g + bias))
        if not per_channel:
            total = total.unsqueeze(-1)
    if g_gamma is not None:
        total = g_gamma.reshape(-1, 1) if total is None else total + g_gamma.reshape(-1, 1)
    return total


def recurrence(op, q, k, v, p=None, g=None, gv=None, g_gamma=None, beta=None, A_log=None, dt_bias=None,
               initial_state=None, cu_seqlens=None, scale=None, reverse=False, qk_l2norm=False, gate="log_decay",
               lower_bound=-5.0, beta_is="value"):
    """(o, final state [N, HV, K, V]) of float64 tensors. math.md, section 2."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if qk_l2norm:
        q, k, p = (x if x is None else x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k, p))
    q, k, p = (x if x is None else x.repeat_interleave(HV // H, 2) for x in (q, k, p))
    decays = _gates(g, g_gamma, A_log, dt_bias, gate, lower_bound, op in ("gla", "kda"))
    if beta is not None and beta_is != "value":
        beta = torch.sigmoid(beta) * (2 if beta_is == "two_sigmoid" else 1)
    if cu_seqlens is None:
        spans = [(b, 0, T) for b in range(B)]
    else:
        ends = cu_seqlens.tolist()
        spans = [(0, begin, end) for begin, end in zip(ends, ends[1:])]
    delta = op in ("delta_rule", "gated_delta_rule", "comba", "kda")
    erase = p if op == "comba" else k
    outputs, states = {}, []
    for n, (b, begin, end) in enumerate(spans):
        S = q.new_zeros(HV, K, V) if initial_state is None else initial_state[n]
        for t in range(begin, end)[::-1 if reverse else 1]:
            before = S
            if decays is not None:
                S = S * (decays[b, t] if decays.dim() == 4 else decays).exp().unsqueeze(-1)
            if gv is not None:
                S = S * gv[b, t].exp().unsqueeze(-2)
            write = v[b, t]
            if delta:
                read = before if op == "comba" else S
                write = write - torch.einsum("hkv,hk->hv", read, erase[b, t])
                if beta is not None:
                    write = write * (beta[b, t] if beta.dim() == 4 else beta[b, t].unsqueeze(-1))
            S = S + k[b, t].unsqueeze(-1) * write.unsqueeze(-2)
            outputs[b, t] = scale * torch.einsum("hkv,hk->hv", S, q[b, t])
        states.append(S)
    if T == 0:
        return v.new_zeros(v.shape), torch.stack(states)
    rows = [torch.stack([outputs[b, t] for t in range(T)]) for b in range(B)]
    return torch.stack(rows), torch.stack(states)
