"""The pictures show the numbers they were given, and leave matplotlib's global state alone."""

import subprocess
import sys

import numpy as np
import pytest

from jaxmoe import viz
from jaxmoe.viz.training import smooth


def test_smooth_keeps_the_first_value_and_averages_the_rest():
    values = [8.0, 4.0, 2.0, 2.0, 1.0]
    np.testing.assert_allclose(smooth(values, 1), [8.0, 14 / 3, 8 / 3, 5 / 3, 1.5])
    np.testing.assert_allclose(smooth(values, 0), values)
    np.testing.assert_allclose(smooth(np.full(40, 3.0), 7), 3.0)


def test_loss_curve(tmp_path):
    losses = np.linspace(5.5, 2.0, 60)
    figure = viz.loss_curve(losses)
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["each step"].get_ydata(), losses)
    assert "uniform guess, ln 256 = 5.55" in lines
    assert "mean of 5 steps" in lines
    assert axes.get_ylabel() == "loss (nats per byte)"
    figure.savefig(tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_loss_curve_of_one_step():
    assert len(viz.loss_curve([5.5]).axes[0].lines) == 2


def test_expert_load_shows_loads_over_the_even_share():
    counts = np.random.default_rng(0).integers(0, 50, (7, 2, 8))
    figure = viz.expert_load(counts, ranks=4)
    for layer in range(2):
        axes = figure.axes[layer]
        want = counts[:, layer] / counts[:, layer].mean(1, keepdims=True)
        np.testing.assert_allclose(np.asarray(axes.images[0].get_array()), want.T)
        assert axes.images[0].norm(1.0) == pytest.approx(0.5)  # the even share is the middle of the colours
        assert len(axes.lines) == 3  # between 4 ranks
    below = figure.axes[2]
    np.testing.assert_allclose(below.lines[0].get_ydata(), (counts[:, 0] / counts[:, 0].mean(1, keepdims=True)).max(1))
    assert below.get_xlabel() == "step"


def test_expert_load_survives_a_step_without_tokens(tmp_path):
    viz.expert_load(np.zeros((3, 4), int)).savefig(tmp_path / "load.png")


def test_batch_routing_shows_weights_and_counts(tmp_path):
    ids = np.array([[0, 3], [3, -1], [1, 0]])
    weights = np.array([[0.75, 0.25], [1.0, 0.0], [0.6, 0.4]])
    figure = viz.batch_routing(ids, weights, num_experts=4, ranks=2, token_labels=["a", "b", "c"])
    main, side = figure.axes[:2]
    shown = np.ma.filled(main.images[0].get_array(), 0.0)
    np.testing.assert_allclose(shown, [[0.75, 0, 0.4], [0, 0, 0.6], [0, 0, 0], [0.25, 1.0, 0]])
    assert [bar.get_width() for bar in side.patches] == [2, 1, 0, 2]
    assert [t.get_text() for t in main.get_xticklabels()] == ["a", "b", "c"]
    figure.savefig(tmp_path / "routing.png")


def test_batch_routing_takes_batches_of_sequences():
    ids = np.zeros((2, 5, 1), int)
    assert viz.batch_routing(ids, np.ones((2, 5, 1)), num_experts=2).axes[0].images[0].get_array().shape == (2, 10)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: viz.loss_curve([]), "at least one step"),
        (lambda: viz.expert_load([1, 2]), r"\[steps, E\].*got shape"),
        (lambda: viz.expert_load([[1, 2, 3]], ranks=2), "2 ranks and 3 experts"),
        (lambda: viz.batch_routing([[0]], [[0.5, 0.5]], num_experts=2), r"both be \[\.\.\., K\]"),
        (lambda: viz.batch_routing([[2]], [[1.0]], num_experts=2), "below num_experts = 2; got 2"),
    ],
)
def test_refusals(make, says):
    with pytest.raises(ValueError, match=says):
        make()


def test_no_global_state():
    code = (
        "import sys; from jaxmoe import viz\n"
        "viz.loss_curve([2.0, 1.0]).savefig('/dev/null', format='png')\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
