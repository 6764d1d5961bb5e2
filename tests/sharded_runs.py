"""Training the same network on one worker and spread over several; used by new processes."""

import torch
from torch import nn

import mkor

STEPS, SAMPLES = 6, 12


class Conv1D(nn.Module):
    """A linear layer whose weight is [inputs, outputs], as that of transformers."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, rows):
        return rows @ self.weight + self.bias


class Net(nn.Module):
    """Convolutions, attention, a layer with fewer rows than workers, with and without biases."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(2, 6, 3, padding=1, groups=2, bias=False)
        self.up = nn.ConvTranspose1d(6, 4, 1)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.free = nn.Linear(4, 5, bias=False)
        self.norm = nn.LayerNorm(5)
        self.branch = nn.Linear(5, 5)
        self.thin = nn.Linear(5, 1)
        self.back = nn.Linear(1, 5)
        self.turned = Conv1D(3, 5)
        self.unturned = nn.Linear(3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, rows):
        tokens = self.mix(self.up(self.conv(rows).relu())).mT
        tokens = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        hidden = self.norm(self.free(tokens).tanh())
        hidden = hidden + self.back(self.thin(self.branch(hidden).tanh()))
        hidden = hidden + self.unturned(self.turned(hidden).tanh())
        return self.head(hidden).mean(dim=1)


def new_model(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


def batches(dtype, steps=STEPS):
    source = torch.Generator().manual_seed(7)
    for _ in range(steps):
        rows = torch.randn(SAMPLES, 2, 3, dtype=dtype, generator=source)
        yield rows, torch.randn(SAMPLES, 2, dtype=dtype, generator=source)


def optimizer_for(model, method="MKOR", base=torch.optim.SGD, **options):
    if method == "auto":
        return mkor.auto(model, lr=0.01, vectors=3, rank=3, **options)
    lr = {"lr": 0.1, "momentum": 0.9} if base is torch.optim.SGD else {"lr": 0.01}
    schedule = {"factor_update_steps": 2, "warmup_steps": 3}
    return getattr(mkor, method)(model, base(model.parameters(), **lr), **schedule, **options)


def train(model, optimizer, share=slice(None), micro=1, dtype=torch.float64, data=None):
    """Train on a share of each batch, in as many micro-batches; whole parameters in the end."""
    for rows, goal in data or batches(dtype):
        parts = list(zip(rows[share].chunk(micro), goal[share].chunk(micro), strict=True))
        optimizer.step(closure_of(model, optimizer, parts))
    return parameters(model)


def closure_of(model, optimizer, parts):
    def closure():
        optimizer.zero_grad()
        for rows, goal in parts:
            loss = (model(rows) - goal).square().mean() / len(parts)
            loss.backward()
        return loss

    return closure


def parameters(model):
    """Detached copies by name, gathered where they are spread."""
    out = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        out[name.replace("module.", "")] = whole.detach().clone()
    return out


def share_of(rank, workers):
    return slice(rank * SAMPLES // workers, (rank + 1) * SAMPLES // workers)


def farthest(actual, expected):
    """The largest difference between parameters, in units of the largest entry, and its name."""
    assert actual.keys() == expected.keys()
    return max(
        (float((actual[n] - t).abs().max() / t.abs().max().clamp_min(1e-3)), n)
        for n, t in expected.items()
    )
