"""Rows for methods that keep them, the dense natural gradient, and workers that answer."""

import torch

from mkor.methods.base import LayerShape, Seen

CPU = torch.device("cpu")


def random_rows(shape, rows, seed=0, dtype=torch.float64):
    """Each sample's own a [G, n, i], the last column ones, and g [G, n, o]."""
    source = torch.Generator().manual_seed(seed)
    a = torch.randn(shape.stack, rows, shape.inputs, dtype=dtype, generator=source)
    g = torch.randn(shape.stack, rows, shape.outputs, dtype=dtype, generator=source)
    a[..., -1] = 1
    return a, g


def seen_of(method, a, g, calls=1, seed=0, loss_scale=1.0):
    """What one worker shows of its rows in `calls` calls of a mean loss, scaled."""
    rows = a.shape[1]
    g = g * loss_scale / rows
    left, right = method.wants(shape_of(a, g))
    assert left == right
    compress = left.compress
    parts = [{"inputs": a, "grads": g}]
    if compress is not None:
        cut = zip(a.chunk(calls, dim=1), g.chunk(calls, dim=1), strict=True)
        parts = [compress(*sides, seed + k) for k, sides in enumerate(cut)]
    kept = {key: torch.cat([part[key] for part in parts], dim=1) for key in parts[0]}
    inputs, grads = kept.pop("inputs"), kept.pop("grads")
    count = torch.tensor([float(rows)], dtype=a.dtype)
    return Seen(inputs, grads, count, torch.zeros(()), grads_reduced=False, kept=kept)


def run_workers(method, states, seen):
    """One update on several workers at once; their new states."""
    generators = [method.update(*pair) for pair in zip(states, seen, strict=True)]
    messages = [next(generator) for generator in generators]
    while True:
        answer = {}
        for key in messages[0].sum:
            answer[key] = sum(message.sum[key] for message in messages)
        for key in messages[0].mean:
            answer[key] = sum(message.mean[key] for message in messages) / len(messages)
        for key in messages[0].gather:
            answer[key] = torch.cat([message.gather[key] for message in messages], dim=1)
        messages, done = [], []
        for generator in generators:
            try:
                messages.append(generator.send(dict(answer)))
            except StopIteration as stop:
                done.append(stop.value)
        if done:
            return done


def run(method, state, seen):
    """One update on one worker."""
    return run_workers(method, [state], [seen])[0]


def start(method, shape, dtype=torch.float64):
    return method.init(shape, CPU, dtype)


def shape_of(a, g):
    return LayerShape(a.shape[0], g.shape[2], a.shape[2])


def per_row_gradients(a, g):
    """u_j = g_j ⊗ a_j, [G, n, o·i], one row at a time."""
    return torch.stack(
        [
            torch.stack([torch.outer(*p).flatten() for p in zip(*s, strict=True)])
            for s in zip(g, a, strict=True)
        ]
    )


def fisher(a, g):
    """F = (1/N) Σ_j u_j u_jᵀ, [G, o·i, o·i]."""
    u = per_row_gradients(a, g)
    return u.mT @ u / a.shape[1]


def natural(curvature, damping, grad):
    """(F + μI)⁻¹ ∇ by a dense solve."""
    eye = torch.eye(curvature.shape[-1], dtype=curvature.dtype)
    flat = grad.flatten(1)[..., None]
    return torch.linalg.solve(curvature + damping * eye, flat).view_as(grad)


def estimate(state):
    """The F of a state: U N' Uᵀ with N' such that V comes out, solved from the kernel, [G, oi, oi].

    V = (∇ - U K̂⁻¹ Uᵀ∇)/μ, so F + μI is the inverse of (I - U K̂⁻¹ Uᵀ)/μ.
    """
    u = per_row_gradients(state["inputs"], state["outputs"])
    root, damping = state["kernel"], state["damping"][:, None, None]
    inner = torch.linalg.inv(root @ root.mT)
    eye = torch.eye(u.shape[-1], dtype=u.dtype)
    return torch.linalg.inv((eye - u.mT @ inner @ u) / damping) - damping * eye


def copies(state):
    return {key: tensor.clone() for key, tensor in state.items()}


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def events(state, *names):
    from mkor.methods.base import EVENTS

    return [int(state["events"][EVENTS.index(name)]) for name in names]
