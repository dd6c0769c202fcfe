"""What the demo's oracle lets pass and what it does not."""

import dataclasses
import math

import jax.numpy as jnp
import pytest

from jaxmoe.demo.oracle import Verdict, relative, selection_gap

GOOD = Verdict(
    forward_rel_err=1e-7,
    grad_rel_err={"a": 1e-7, "b": 2e-7},
    grad_norm={"a": 1.0, "b": 1.0},
    tokens=10,
    selection_differs=1,
    selection_gap=1e-6,
    loss=1.0,
)


def test_relative():
    assert relative([3.0, 4.0], [0.0, 0.0]) == 5.0
    assert relative([1.0, 1.1], [1.0, 1.0]) == pytest.approx(0.1 / math.sqrt(2))
    assert math.isnan(relative([math.nan], [1.0]))


def test_gap_is_how_much_better_the_own_choice_is():
    scores = jnp.array([[0.9, 0.5, 0.4, 0.1]] * 4)
    recorded = jnp.array([[0, 1], [1, 0], [0, 2], [3, 2]])
    own = jnp.array([[0, 1]] * 4)
    assert selection_gap(scores, recorded, own).tolist() == pytest.approx([0.0, 0.0, 0.1, 0.8])


def test_rounding_and_near_ties_pass():
    assert GOOD.faults == []
    assert GOOD.max_grad_rel_err == 2e-7


@pytest.mark.parametrize("bad", [1e-3, math.nan, math.inf])
@pytest.mark.parametrize(
    ("field", "says"),
    [("forward_rel_err", "the logits"), ("grad_rel_err", "the gradients of b"), ("selection_gap", "a token was sent")],
)
def test_everything_else_is_a_fault(field, says, bad):
    value = {"a": 1e-7, "b": bad} if field == "grad_rel_err" else bad
    (fault,) = dataclasses.replace(GOOD, **{field: value}).faults
    assert fault.startswith(says)
    assert f"{bad:.1e}" in fault
