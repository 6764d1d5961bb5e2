"""SOAP and Muon as rows: what is trained by what, resuming, and what is said where they are not."""

import copy
import sys

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mkor_bench.errors import UserError
from mkor_bench.rivals import ADAMW_SHARE, Matrices, build_muon, build_soap, hidden_weights

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="needs torch 2.9")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.inner = nn.Linear(6, 6)
        self.out = nn.Linear(6, 5)
        self.again = nn.Linear(6, 5, bias=False)
        self.again.weight = self.table.weight
        self.head = nn.Linear(5, 2)


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3)
    )


def steps(model, optimizer, count, begin=0):
    losses = []
    for number in range(begin, begin + count):
        rows = torch.randn(16, 1, 4, 4, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        loss = (model(rows) - rows.mean((1, 2, 3))[:, None]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_hidden_weights_are_all_but_the_head_and_what_an_embedding_shares():
    model = Tied()
    found = hidden_weights(model)
    assert [id(weight) for weight in found] == [id(model.inner.weight), id(model.out.weight)]


def test_a_matrix_is_its_weight():
    weight = nn.Parameter(torch.randn(4, 2, 3, 3))
    matrices = Matrices([weight])
    weight.grad = torch.randn_like(weight)
    matrices.take_gradients()
    with torch.no_grad():
        matrices.flat[0].add_(1)
    assert torch.equal(matrices.flat[0], weight.flatten(1))
    assert torch.equal(matrices.flat[0].grad, weight.grad.flatten(1))


@needs_muon
def test_muon_steps_every_weight_as_torch_does():
    model = convnet()
    reference = copy.deepcopy(model)
    lr = 0.02
    ours = build_muon(model, lr)
    conv, hidden = reference[0].weight, reference[3].weight
    matrix = nn.Parameter(conv.detach().view(4, 9))
    muon = torch.optim.Muon([matrix, hidden], lr=lr)
    rest = [p for p in reference.parameters() if p is not conv and p is not hidden]
    adamw = torch.optim.AdamW(rest, lr=ADAMW_SHARE * lr)
    rows = torch.randn(16, 1, 4, 4)
    for _ in range(3):
        for net in (model, reference):
            net.zero_grad()
            net(rows).square().mean().backward()
        matrix.grad = conv.grad.flatten(1)
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@needs_muon
def test_one_scheduler_moves_both_parts():
    optimizer = build_muon(convnet(), 0.02)
    LambdaLR(optimizer, lambda step: 0.5)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == pytest.approx([0.01, 0.01 * ADAMW_SHARE])
    assert [p.param_groups[0]["lr"] for p in optimizer._parts] == rates


@needs_muon
def test_muon_continues_where_it_was():
    torch.manual_seed(0)
    model = convnet()
    optimizer = build_muon(model, 0.02)
    steps(model, optimizer, 3)
    other = convnet()
    other.load_state_dict(model.state_dict())
    resumed = build_muon(other, 0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(other, resumed, 4, 3) == steps(model, optimizer, 4, 3)


@needs_muon
def test_a_model_without_hidden_weights_is_left_to_adamw():
    model = nn.Linear(3, 2)
    optimizer = build_muon(model, 0.02)
    assert [type(part) for part in optimizer._parts] == [torch.optim.AdamW]


def test_an_old_torch_is_told(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(UserError, match=r"optimizer 'muon' needs torch 2.9 or later, this is"):
        build_muon(convnet(), 0.02)


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UserError, match="pip install pytorch_optimizer, or leave soap out"):
        build_soap(convnet(), 0.01)
