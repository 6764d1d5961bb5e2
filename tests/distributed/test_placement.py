"""Who holds a layer, from nothing but costs and numbers of workers."""

import random

import pytest

from mkor.distributed.placement import Place, assign, column_size, columns, rows


def loads(places, costs, workers):
    out = [0.0] * workers
    for name, place in places.items():
        out[place.owner] += costs[name]
    return out


@pytest.mark.parametrize(
    ("fraction", "workers", "size"),
    [
        *[(1.0, p, p) for p in (1, 2, 3, 4, 64)],
        *[(1 / p, p, 1) for p in (1, 2, 3, 4, 7, 49, 64)],
        *[(1e-9, 64, 1), (0.5, 4, 2), (0.26, 4, 2), (0.51, 4, 4), (0.4, 6, 3), (0.5, 3, 3)],
    ],
)
def test_a_column_has_the_fraction_rounded_up_to_a_divisor(fraction, workers, size):
    assert column_size(fraction, workers) == size


def test_columns_and_rows_cross_once():
    assert columns(6, 2) == [[0, 1], [2, 3], [4, 5]]
    assert rows(6, 2) == [[0, 2, 4], [1, 3, 5]]
    for size in (1, 2, 3, 6):
        for column in columns(6, size):
            assert all(len(set(column) & set(row)) == 1 for row in rows(6, size))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_work_is_balanced(size):
    """No worker has more than a fair share and the largest layer, as greedy rules ensure."""
    source = random.Random(size)
    costs = {f"layer{i}": source.choice([1, 8, 27, 64, 512]) for i in range(40)}
    places = assign(costs, 8, size, {})
    assert list(places) == list(costs)
    fair = sum(costs.values()) / 8
    assert max(loads(places, costs, 8)) < fair + max(costs.values())
    assert all(place.owner in columns(8, size)[place.column] for place in places.values())


def test_the_longest_comes_first():
    costs = {"a": 2.0, "b": 3.0, "c": 2.0, "d": 3.0, "e": 2.0}
    places = assign(costs, 2, 1, {})
    assert loads(places, costs, 2) == [7.0, 5.0] or loads(places, costs, 2) == [5.0, 7.0]
    # In the order of the names the first worker would have got 2 + 2 + 2 and the other 3 + 3.
    assert [places[name].owner for name in "bd"] == [0, 1]


def test_the_same_costs_give_the_same_places_in_any_process():
    costs = dict.fromkeys("abcdefgh", 1.0)
    assert assign(costs, 4, 2, {}) == assign(dict(costs), 4, 2, {})
    assert [assign(costs, 4, 1, {})[name].owner for name in costs] == [0, 1, 2, 3, 0, 1, 2, 3]


def test_known_layers_keep_their_place_and_count():
    known = {"a": Place(1, 1), "gone": Place(0, 0)}
    places = assign({"a": 8.0, "b": 1.0, "c": 1.0}, 2, 1, known)
    assert places == {"a": Place(1, 1), "b": Place(0, 0), "c": Place(0, 0)}
