"""The front: what no other measurement beats on every objective."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.scoring.pareto import front

SMALL = st.integers(0, 4).map(float)


def test_a_point_that_is_worse_everywhere_is_not_on_the_front():
    assert front([(2.0, 2.0), (1.0, 1.0), (3.0, 0.5)]) == [0, 2]


def test_with_one_objective_the_front_is_the_best_point():
    assert front([(1.0,), (3.0,), (2.0,)]) == [1]


def test_of_equal_points_the_first_stays():
    assert front([(1.0, 2.0), (1.0, 2.0), (2.0, 1.0), (2.0, 1.0)]) == [0, 2]


def test_no_points_have_no_front():
    assert front([]) == []


@given(st.lists(st.tuples(SMALL, SMALL, SMALL), max_size=25))
def test_every_point_off_the_front_is_beaten_by_one_on_it_and_none_on_it_is(points):
    def beats(one, other):
        return all(a >= b for a, b in zip(one, other, strict=True)) and one != other

    found = front(points)
    for i, point in enumerate(points):
        if i in found:
            assert not any(beats(other, point) for other in points)
        else:
            assert any(beats(points[j], point) or points[j] == point for j in found)
    assert len({points[i] for i in found}) == len(found)
