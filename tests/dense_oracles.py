"""The formulas of MKOR written the slow way, in float64 and one matrix at a time.

Nothing here comes from the library: covariances are formed, inverted and blended explicitly.
"""

import torch


def moving_average(covariance, vectors, decay):
    """L ← γL + (1-γ)VVᵀ, the columns of V summed one outer product at a time."""
    out = decay * covariance
    for column in vectors.T:
        out = out + (1 - decay) * torch.outer(column, column)
    return out


def stabilised(inverse, limit, blend):
    """wJ + (1-w)I where max |J_ij| exceeds ε or is below 1/ε; and whether it was.

    w is ζ, or less where ζ would not bring the norm back to about ε.
    """
    norm = float(inverse.abs().max())
    if norm > limit or norm < 1 / limit:
        weight = min(blend, limit / norm)
        return weight * inverse + (1 - weight) * torch.eye(len(inverse), dtype=inverse.dtype), True
    return inverse, False


def exact(inverse, vectors, decay, limit=float("inf"), blend=1.0):
    """Invert, average, invert."""
    inverse, acted = stabilised(inverse, limit, blend)
    covariance = moving_average(torch.linalg.inv(inverse), vectors, decay)
    return torch.linalg.inv(covariance), acted


def paper(inverse, vectors, decay, limit=float("inf"), blend=1.0):
    """Eq. 5/6 as printed, once per vector."""
    inverse, acted = stabilised(inverse, limit, blend)
    for v in vectors.T:
        below = decay**2 * (1 + decay * (1 - decay) * (v @ inverse @ v))
        inverse = decay * inverse + (1 - decay) / below * (inverse @ torch.outer(v, v) @ inverse)
    return inverse, acted


def reference(inverse, vectors, blend, limit=2.0):
    """B = ζJ + (1-ζ)I, then B - Bvvᵀ B/(1 + vᵀBv) per vector; I where max |J_ij| > 2."""
    eye = torch.eye(len(inverse), dtype=inverse.dtype)
    if inverse.abs().max() > limit:
        return eye, True
    inverse = blend * inverse + (1 - blend) * eye
    for v in vectors.T:
        image = inverse @ v
        inverse = inverse - torch.outer(image, image) / (1 + v @ image)
    return inverse, False
