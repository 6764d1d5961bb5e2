"""Statistics in float16 on the wire, at sizes that float16 itself can't hold."""

import pytest
import torch

from gloo import spawn
from mkor.distributed import comm
from mkor.distributed.bucket import gather_flat, reduce_flat

SIZES = {
    "a sum over many rows": (1e6, torch.float32),
    "a covariance of gradients": (1e-9, torch.float32),
    "the largest of float32": (1e38, torch.float32),
    "a covariance of tiny gradients": (1e-28, torch.float32),
    "beyond float32": (1e200, torch.float64),
    "moderate": (1.0, torch.float32),
}
WORKERS = 2


def tensors_of(rank):
    """By name, of an own shape each; what a worker has differs by a factor of 50."""
    generator = torch.Generator().manual_seed(rank)
    return {
        name: torch.rand(1, 3 + rank, 4 + i, generator=generator, dtype=torch.float64)
        .mul(size / 50**rank)
        .to(dtype)
        for i, (name, (size, dtype)) in enumerate(SIZES.items())
    }


def summed(name, rank):
    return tensors_of(rank)[name][:, :3]  # of one shape on all workers


def worker(rank):
    rows = list(tensors_of(rank).values())
    sums = [summed(name, rank) for name in SIZES]
    return {
        "sum": reduce_flat(sums, comm.all_reduce_sum, torch.float16),
        "gather": gather_flat(rows, comm.all_gather_counts, comm.all_gather_vectors, torch.float16),
        "odd": reduce_flat(odd(rank), comm.all_reduce_sum, torch.float16),
    }


def odd(rank):
    """Without entries, zero, and not finite on one worker."""
    broken = torch.ones(2) if rank else torch.tensor([1.0, float("nan")])
    infinite = torch.tensor([1.0, float("inf")]) if rank else torch.ones(2)
    return [torch.zeros(0, 3), torch.zeros(2), broken, infinite]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return spawn(worker, tmp_path_factory.mktemp("workers"), workers=WORKERS)


@pytest.mark.parametrize("place", range(len(SIZES)), ids=SIZES)
def test_sums_keep_the_digits_of_float16_at_any_size(found, place):
    name = list(SIZES)[place]
    expected = sum(summed(name, rank).double() for rank in range(WORKERS))
    for own in found:
        assert own["sum"][place].dtype == SIZES[name][1]
        off = (own["sum"][place].double() - expected).abs().max() / expected.abs().max()
        assert 0 < off < 2**-10


@pytest.mark.parametrize("place", range(len(SIZES)), ids=SIZES)
def test_rows_keep_the_digits_of_float16_at_any_size(found, place):
    name = list(SIZES)[place]
    expected = torch.cat([tensors_of(rank)[name] for rank in range(WORKERS)], dim=1)
    for own in found:
        actual = own["gather"][place]
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=2**-10, atol=0)


def test_tensors_that_are_empty_zero_or_not_finite_stay_so(found):
    for own in found:
        empty, zero, broken, infinite = own["odd"]
        assert empty.shape == (0, 3)
        assert torch.equal(zero, torch.zeros(2))
        assert float(broken[0]) == 2 and bool(broken[1].isnan())
        assert float(infinite[0]) == 2 and bool(infinite[1].isinf())
