"""The operators of headrace.torch in chunked plain PyTorch: what the model would run on without the library.

Formulas and letters: docs/math.md. Rows of a chunk stand in dimension -2, chunks in dimension -3.
"""

from contextlib import contextmanager
from functools import partial

import torch
from torch.nn import functional as F

import headrace.torch._functions as functions
from headrace.bench._training import of_transformers as function_of_transformers

# The fastest of 16, 32, 64: a decay of every channel makes a tensor [C, C, K], one of the head [C, C].
HEAD_CHUNK, CHANNEL_CHUNK = 32, 16


def gates(g, g_gamma, gate, lower_bound, A_log, dt_bias):
    """The log decay of every step, [B, T, HV, 1 or K], from what the operators take."""
    if g is None:
        return g_gamma.view(1, 1, -1, 1)
    if gate != "log_decay":
        g = g.float() + (0 if dt_bias is None else dt_bias.view(g.shape[2:]))
        rate = A_log.exp() if g.dim() == 3 else A_log.exp()[:, None]
        g = -rate * F.softplus(g) if gate == "softplus" else lower_bound * torch.sigmoid(rate * g)
    return g if g.dim() == 4 else g.unsqueeze(-1)


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def decays(G_a, G_b):
    """exp(G_a_ic - G_b_jc) for j <= i, else 0: [..., C, C, 1 or K]. Each pair has its exponent: none is positive."""
    dropped = torch.ones(G_a.shape[-2], G_a.shape[-2], dtype=torch.bool).triu(1).unsqueeze(-1)
    return (G_a.unsqueeze(-2) - G_b.unsqueeze(-3)).masked_fill(dropped, -torch.inf).exp()


def decayed_scores(a, b, D):
    """sum_c a_ic b_jc D_ijc: [..., C, C]"""
    if D.shape[-1] == 1:
        return (a @ b.mT) * D.squeeze(-1)
    return (a.unsqueeze(-2) * b.unsqueeze(-3) * D).sum(-1)


def chunked(q, k, v, p, g, beta, S):
    """o [B, H, T, V] and the state after it.

    q (scaled), k, p (Comba, else None) [B, H, T, K], v [B, H, T, V], g [B, H, T, 1 or K], beta (None: additive rule)
    [B, H, T, 1], S [B, H, K, V].
    """
    T = q.shape[2]
    C = min(HEAD_CHUNK if g.shape[-1] == 1 else CHANNEL_CHUNK, T)
    q, k, v, p, g, beta = (x if x is None else F.pad(x, (0, 0, 0, -T % C)).unflatten(2, (-1, C))
                           for x in (q, k, v, p, g, beta))
    G = g.cumsum(-2)
    D = decays(G, G)
    P = decayed_scores(q, k, D)
    q_decayed, k_decayed, decay = q * G.exp(), k * (G[..., -1:, :] - G).exp(), G[..., -1, :].exp().unsqueeze(-1)
    if beta is not None:
        e, G_e = (k, G) if p is None else (p, G - g)
        L = beta * decayed_scores(e, k, D if p is None else decays(G_e, G)).tril(-1)
        W, U = torch.linalg.solve_triangular(
            L, torch.cat([beta * e * G_e.exp(), beta * v], -1), upper=False, unitriangular=True
        ).split([k.shape[-1], v.shape[-1]], -1)
    o = []
    for n in range(q.shape[2]):
        written = v[:, :, n] if beta is None else U[:, :, n] - W[:, :, n] @ S
        o.append(q_decayed[:, :, n] @ S + P[:, :, n] @ written)
        S = decay[:, :, n] * S + k_decayed[:, :, n].mT @ written
    return torch.cat(o, 2)[:, :, :T], S


def token(q, k, v, p, g, beta, S):
    """As `chunked`, for one token."""
    decayed = g.exp().mT * S
    erased = k @ decayed if p is None else p @ S
    written = v if beta is None else beta * (v - erased)
    S = decayed + k.mT * written
    return q @ S, S


def of_transformers(operator):
    """The function of transformers in the place of `chunked`; None where there is none, or no transformers."""
    function = function_of_transformers(operator)

    def chunked_by_transformers(q, k, v, p, g, beta, S):
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q * q.shape[-1]**0.5, k, v, g, beta))
        g = g if operator == "kda" else g.squeeze(-1)
        o, S = function(q, k, v, g=g, beta=beta.squeeze(-1), initial_state=S, output_final_state=True)
        return o.transpose(1, 2), S

    return function and chunked_by_transformers


def run(op, q, k, v, *, chunked=chunked, p=None, g=None, g_gamma=None, beta=None, A_log=None, dt_bias=None,
        initial_state=None, output_final_state=False, scale=None, l2norm=False, gate="log_decay", lower_bound=None,
        beta_is="value", serving=None, **hints):
    """What headrace.torch calls for each of its functions; here for dense batches. The rule follows from p and beta."""
    del op, hints
    dtype, (B, T, _, K) = q.dtype, q.shape
    g = gates(g, g_gamma, gate, -5.0 if lower_bound is None else lower_bound, A_log, dt_bias).expand(B, T, -1, -1)
    if l2norm:
        q, k, p = (x if x is None else unit(x.float()) for x in (q, k, p))
    if beta is not None and beta_is != "value":
        beta = beta.float().sigmoid() * (2 if beta_is == "two_sigmoid" else 1)
    q, k, v, p, g, beta = (x if x is None else x.float().transpose(1, 2)
                           for x in (q, k, v, p, g, beta if beta is None else beta.unsqueeze(-1)))
    S = q.new_zeros(B, v.shape[1], K, v.shape[-1]) if initial_state is None else initial_state
    o, S = (token if T == 1 else chunked)(q * (K**-0.5 if scale is None else scale), k, v, p, g, beta, S)
    if serving is not None:
        S = initial_state.copy_(S)
    return o.transpose(1, 2).to(dtype), S if output_final_state or serving is not None else None


@contextmanager
def plain_pytorch(chunked=chunked):
    """Inside, the functions of headrace.torch compute in plain PyTorch."""
    original, functions._run = functions._run, partial(run, chunked=chunked)
    try:
        yield
    finally:
        functions._run = original
