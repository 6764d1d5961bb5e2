"""K-FAC written the slow way, in float64 and one matrix at a time, and a driver of several workers.

Nothing of the mathematics comes from the library: rows are summed one outer product at a time,
Kronecker products are formed, and systems are solved densely.
"""

import torch

from mkor.messages import Owned
from mkor.methods.base import LayerShape, Seen
from mkor.methods.kfac import KFACMethod


def method(**options):
    """K-FAC with usual options and those given."""
    usual = {
        "solver": "eigen",
        "decay": 0.9,
        "damping": 0.01,
        "damping_split": "factored",
        "weight_sharing": "expand",
        "factor_update_steps": 1,
        "inverse_update_steps": 1,
        "warmup_steps": 0,
        "max_dim": 1024,
        "state_dtype": None,
        "inverse_dtype": None,
        "on_nonfinite": "skip",
    }
    return KFACMethod(**{**usual, **options})


def fresh(kfac, shape, parameters=torch.float64):
    return kfac.init(shape, torch.device("cpu"), parameters)


def random_rows(shape, rows, dtype=torch.float64):
    """Inputs a [G, n, i] and per-sample output gradients [G, n, o], of unequal scales."""
    spread = torch.linspace(0.2, 2, shape.inputs, dtype=dtype)
    inputs = torch.randn(shape.stack, rows, shape.inputs, dtype=dtype) * spread
    return inputs, 3 * torch.randn(shape.stack, rows, shape.outputs, dtype=dtype)


def seen_of(inputs, own, samples=None, factor=1.0, **options):
    """What a worker shows of its rows a [G, n, i] and its samples' own gradients [G, n, o].

    Autograd sees a mean over the worker's samples times `factor`, the loss scale.
    """
    rows = inputs.shape[1]
    samples = rows if samples is None else samples
    grads = own * (factor / max(samples, 1))
    counts = {"rows": rows, "samples": samples}
    counts = {key: torch.tensor([float(n)], dtype=inputs.dtype) for key, n in counts.items()}
    return Seen(
        inputs.mT @ inputs,
        grads.mT @ grads,
        gradient=torch.zeros(()),
        grads_reduced=False,
        **counts,
        **options,
    )


def run(kfac, states, seens):
    """One update of as many workers as there are states; their new states."""
    updates = [kfac.update(state, seen) for state, seen in zip(states, seens, strict=True)]
    messages = [next(update) for update in updates]
    while True:
        results = []
        for update in updates:
            try:
                results.append(update.send(combined(messages)))
            except StopIteration as stop:
                results.append(stop.value)
        if isinstance(results[0], dict):
            return results
        messages = results


def combined(messages):
    """What every worker gets back."""
    if isinstance(messages[0], Owned):
        return messages[0].compute()
    out = {}
    for key in messages[0].sum:
        out[key] = sum(message.sum[key] for message in messages)
    for key in messages[0].mean:
        out[key] = sum(message.mean[key] for message in messages) / len(messages)
    for key in messages[0].gather:
        out[key] = torch.cat([message.gather[key] for message in messages], dim=1)
    return out


def update(kfac, state, seen):
    """One update on one worker."""
    return run(kfac, [state], [seen])[0]


def second_moment(rows):
    """E[vvᵀ] of the rows [n, d], one outer product at a time."""
    out = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for row in rows.double():
        out += torch.outer(row, row)
    return out / len(rows)


def moving_average(moments, decay):
    """The mean of the moments with weights that decay with age and sum to one."""
    weights = [decay**age for age in reversed(range(len(moments)))]
    return sum(w * m for w, m in zip(weights, moments, strict=True)) / sum(weights)


def kronecker_solve(A, G, grad, damping):
    """(A⊗G + λI)⁻¹ vec(∇), the whole matrix formed."""
    whole = torch.kron(G, A)  # of a gradient [o, i] read row by row
    whole += damping * torch.eye(len(whole), dtype=whole.dtype)
    return torch.linalg.solve(whole, grad.reshape(-1)).view_as(grad)


def factor_solve(A, G, grad, to_A, to_G):
    """(G + ·I)⁻¹ ∇ (A + ·I)⁻¹."""
    left = torch.linalg.inv(G + to_G * torch.eye(len(G), dtype=G.dtype))
    right = torch.linalg.inv(A + to_A * torch.eye(len(A), dtype=A.dtype))
    return left @ grad @ right


def factored(A, G, damping):
    """√λ·π and √λ/π, what is added to A and to G."""
    pi = float(((A.trace() / len(A)) / (G.trace() / len(G))) ** 0.5)
    return damping**0.5 * pi, damping**0.5 / pi


SHAPES = [LayerShape(1, 4, 5), LayerShape(3, 2, 4)]
