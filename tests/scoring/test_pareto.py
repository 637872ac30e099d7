"""The front: what no other measurement beats on every objective."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.scoring.pareto import front

SMALL = st.integers(0, 4).map(float)


def test_a_point_that_is_worse_everywhere_is_not_on_the_front():
    assert front([(1.0, 1.0), (2.0, 2.0), (0.5, 3.0)], ["minimize", "minimize"]) == [0, 2]


def test_larger_is_better_where_an_objective_is_maximised():
    assert front([(1.0, 10.0), (1.0, 20.0), (2.0, 30.0)], ["minimize", "maximize"]) == [1, 2]


def test_with_one_objective_the_front_is_the_best_point():
    assert front([(3.0,), (1.0,), (2.0,)], ["minimize"]) == [1]


def test_of_equal_points_the_first_stays():
    assert front([(1.0, 2.0), (1.0, 2.0), (2.0, 1.0), (2.0, 1.0)], ["minimize", "minimize"]) == [0, 2]


def test_no_points_have_no_front():
    assert front([], ["minimize"]) == []


@given(
    st.lists(st.tuples(SMALL, SMALL, SMALL), max_size=25),
    st.lists(st.sampled_from(["minimize", "maximize"]), min_size=3, max_size=3),
)
def test_every_point_off_the_front_is_beaten_by_one_on_it_and_none_on_it_is(points, directions):
    def costs(point):
        return [
            value if direction == "minimize" else -value for value, direction in zip(point, directions, strict=True)
        ]

    def beats(one, other):
        return all(a <= b for a, b in zip(costs(one), costs(other), strict=True)) and costs(one) != costs(other)

    found = front(points, directions)
    for i, point in enumerate(points):
        if i in found:
            assert not any(beats(other, point) for other in points)
        else:
            assert any(beats(points[j], point) or points[j] == point for j in found)
    assert len({points[i] for i in found}) == len(found)
