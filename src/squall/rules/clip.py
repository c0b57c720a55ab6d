"""Clipping: the factor by which a gradient that is too long is shortened."""


def clip_factor(total_norm: float, clip_norm: float) -> float:
    """What to multiply a gradient with, so that its norm is at most `clip_norm`.

    Args:
        total_norm: the 2-norm of the whole gradient, all of its tensors together, at least 0.
        clip_norm: the bound, at least 0.
    Returns:
        A factor of at most 1. An infinite norm gives 0 and one that is no number gives nan; both leave a
        gradient that is not finite as it is.
    Source: torch.nn.utils.clip_grad_norm_, its 1e-6 in the denominator included; Pascanu, Mikolov, Bengio, "On the
        difficulty of training recurrent neural networks", 2013, Algorithm 1 has none.

    >>> clip_factor(0.5, 1.0), round(clip_factor(4.0, 1.0), 6)
    (1.0, 0.25)
    """
    factor = clip_norm / (total_norm + 1e-6)
    # Not min(): of nan and 1 it would return whichever comes first.
    return 1.0 if factor > 1 else factor
