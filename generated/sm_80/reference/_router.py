"""The choice of experts by a router's logits, its losses, and their gradient, in plain PyTorch.

Experts are chosen by their logits where no bias and no sum of several scores has a say: scores grow
with logits, and rounded ones might be equal where logits are not.  NaN comes first, as in `topk`,
and of equal ones the lowest number: every row chooses K experts that differ, whatever it holds, and
a weight of what is not finite is not finite either (but sigmoid, which is 1 and 0 of infinities).
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import _steps as steps

_LEAST_TOTAL = 1e-20
"""What is added to the sum of a row's scores before they become shares; no sigmoid is as small."""


def forward(
    a: Tensor,
    *,
    score: str,
    normalized: bool,
    scale: float,
    eps: float,
    least_sum: float,
    aux_coefficient: float,
    z_coefficient: float,
    sequences: int,
    top_k: int,
    groups: int,
    kept_groups: int,
    group_top: int,
    choice_bias: Tensor | None = None,
    all_counts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits a [T, E] -> weights and losses, and who was chosen: [T, K], [], [], [T, K] and [E].

    `choice_bias` [E] is added to scores for the choice alone.  `all_counts` [E] is how often each
    expert is chosen where the auxiliary loss counts more than these rows; otherwise it is the mean
    of that of `sequences` of neighbouring rows.
    """
    x = steps.wide(a)
    _check_sequences(x, sequences, all_counts)
    scores = _scores(x, score)
    by_scores = choice_bias is not None or (groups > 1 and group_top > 1)
    values = (scores if by_scores else x).detach()
    values = values if choice_bias is None else values + choice_bias
    ids = _choice(values, top_k, groups, kept_groups, group_top)
    chosen = scores.gather(-1, ids)
    if normalized:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps).clamp_min(least_sum)
    counts = ids.flatten().bincount(minlength=x.shape[-1])
    aux_loss, z_loss = x.new_zeros(()), x.new_zeros(())
    if aux_coefficient:
        factors = _factors(all_counts, counts, ids, sequences, aux_coefficient, x)
        shares = _shares(scores, score).unflatten(0, (sequences, -1))
        aux_loss = (factors * shares.sum(1)).sum()
    if z_coefficient:
        z_loss = z_coefficient * x.logsumexp(-1).square().sum() / max(x.shape[0], 1)
    return scale * chosen, aux_loss, z_loss, ids.to(torch.int32), counts


def backward(
    a: Tensor,
    b: Tensor,
    *,
    ids: Tensor,
    counts: Tensor,
    like: Tensor,
    score: str,
    normalized: bool,
    scale: float,
    eps: float,
    least_sum: float,
    aux_coefficient: float,
    z_coefficient: float,
    sequences: int,
    all_counts: Tensor | None = None,
    grad_aux: Tensor | None = None,
    grad_z: Tensor | None = None,
) -> Tensor:
    """Gradients a [T, K] of weights and of losses, [] each, of logits b [T, E] -> [T, E].

    It is rounded to the type of `like`.
    """
    x, slots = steps.wide(b), ids.long()
    scores = _scores(x, score)
    chosen, given = scores.gather(-1, slots), scale * steps.wide(a)
    if normalized:
        total = chosen.sum(-1, keepdim=True) + eps
        divisor = total.clamp_min(least_sum)
        mean = (given * chosen).sum(-1, keepdim=True) / divisor
        given = (given - mean.masked_fill(total < least_sum, 0.0)) / divisor
    dscores = torch.zeros_like(scores).scatter(-1, slots, given)
    if aux_coefficient and grad_aux is not None:
        factors = grad_aux * _factors(all_counts, counts, slots, sequences, aux_coefficient, x)
        rows = factors.repeat_interleave(x.shape[0] // sequences, dim=0)
        dscores = dscores + _of_scores(rows, scores, score)
    dx = _of_logits(dscores, x, scores, score)
    if z_coefficient and grad_z is not None:
        factor = 2.0 * z_coefficient / max(x.shape[0], 1) * grad_z
        dx = dx + factor * x.logsumexp(-1, keepdim=True) * x.softmax(-1)
    return dx.to(like.dtype)


def _check_sequences(x: Tensor, sequences: int, all_counts: Tensor | None) -> None:
    if sequences < 1 or x.shape[0] % sequences:
        raise ValueError(f"sequences: expected a divisor of {x.shape[0]} tokens, got {sequences}")
    if all_counts is not None and sequences != 1:
        raise ValueError("sequences: expected 1 beside all_counts, which are of one loss")


def _scores(x: Tensor, score: str) -> Tensor:
    """What the weights of experts are made of, [T, E]."""
    if score == "softmax":
        return x.softmax(-1)
    return x.sigmoid() if score == "sigmoid" else _softplus(x).sqrt()


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) of any x; the function of PyTorch is x from 20 on."""
    return x.clamp_min(0.0) + x.abs().neg().exp().log1p()


def _choice(values: Tensor, top_k: int, groups: int, kept_groups: int, group_top: int) -> Tensor:
    """The largest of the groups that are kept, largest first; [T, K]."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    if groups > 1:
        best = values.unflatten(-1, (groups, -1)).sort(dim=-1, descending=True).values
        sums = best[..., :group_top].sum(-1)
        first = sums.argsort(dim=-1, descending=True, stable=True)[..., :kept_groups]
        kept = torch.zeros_like(sums, dtype=torch.uint8).scatter(-1, first, 1)
        members = kept.repeat_interleave(values.shape[-1] // groups, dim=-1).gather(-1, order)
        order = order.gather(-1, members.argsort(dim=-1, descending=True, stable=True))
    return order[..., :top_k]


def _factors(
    all_counts: Tensor | None,
    counts: Tensor,
    ids: Tensor,
    sequences: int,
    coefficient: float,
    x: Tensor,
) -> Tensor:
    """What the auxiliary loss multiplies each expert's sum of a sequence's shares by, [B, E].

    The counts add up to K for each row that they are of, so that these are E c n / (K rows^2 B).
    """
    own = (counts if all_counts is None else all_counts)[None]
    if sequences != 1:
        slots = ids.reshape(sequences, -1)
        own = own.new_zeros(sequences, x.shape[-1]).scatter_add(-1, slots, torch.ones_like(slots))
    number = own.to(x.dtype)
    total = number.sum(-1, keepdim=True).clamp_min(1.0)
    return coefficient * ids.shape[-1] * x.shape[-1] * (number / total) / (sequences * total)


def _shares(scores: Tensor, score: str) -> Tensor:
    """Scores of a row divided by their sum, [T, E]."""
    return scores if score == "softmax" else scores / _totals(scores)


def _totals(scores: Tensor) -> Tensor:
    return scores.sum(-1, keepdim=True) + _LEAST_TOTAL


def _of_scores(dshares: Tensor, scores: Tensor, score: str) -> Tensor:
    """Gradients of shares as those of scores."""
    if score == "softmax":
        return dshares
    mean = (dshares * _shares(scores, score)).sum(-1, keepdim=True)
    return (dshares - mean) / _totals(scores)


def _of_logits(dscores: Tensor, x: Tensor, scores: Tensor, score: str) -> Tensor:
    """Gradients of scores as those of logits."""
    if score == "softmax":
        return scores * (dscores - (dscores * scores).sum(-1, keepdim=True))
    if score == "sigmoid":
        return dscores * scores * (1.0 - scores)
    slope = x.sigmoid() / (2.0 * scores)
    return dscores * slope.masked_fill(scores == 0.0, 0.0)
