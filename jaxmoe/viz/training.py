"""The loss over the steps."""

import math

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import ArrayLike


def smooth(values: ArrayLike, reach: int) -> np.ndarray:
    """out[i] = the mean of values[i - r] … values[i + r], r = min(i, reach); fewer where they end.

    As wide to the right as to the left at the start, so that a steep first fall is not averaged away.

    Example:
      >>> smooth([4.0, 2.0, 0.0], 1).tolist()
      [4.0, 2.0, 1.0]
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, np.float64))])
    place = np.arange(sums.size - 1)
    near = np.minimum(place, reach)
    first, last = place - near, np.minimum(place + near + 1, place.size)
    return (sums[last] - sums[first]) / (last - first)


def loss_curve(loss: ArrayLike, *, vocabulary: int = 256, title: str = "Training loss") -> Figure:
    """The loss of every step, its running mean, and the loss of a uniform guess.

    Args:
      loss: [steps] in nats per token.
      vocabulary: the tokens there are; a uniform guess costs ln(vocabulary).
      title: of the picture.

    Returns:
      A Figure; `figure.savefig("loss.png")` writes it.

    Raises:
      ValueError: no losses.

    Example:
      >>> loss_curve([5.5, 4.0, 3.5]).axes[0].get_xlabel()
      'step'
    """
    values = np.asarray(loss, np.float64)
    if values.ndim != 1 or not values.size:
        raise ValueError(f"loss must be [steps] of at least one step; got shape {values.shape}. Pass floats.")
    reach = values.size // 24
    steps = np.arange(1, values.size + 1)
    mean, uniform = smooth(values, reach), math.log(vocabulary)
    dots = "." if values.size < 30 else None
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.add_subplot()
    guess = f"uniform guess, ln {vocabulary} = {uniform:.2f}"
    axes.axhline(uniform, color="0.55", linewidth=1, linestyle="--", label=guess)
    axes.plot(steps, values, color="tab:blue", alpha=0.35, linewidth=1, marker=dots, label="each step")
    if reach:
        axes.plot(steps, mean, color="tab:blue", linewidth=2, label=f"mean of {2 * reach + 1} steps")
    end = (float(steps[-1]), float(mean[-1]))
    axes.annotate(f"{end[1]:.2f}", end, xytext=(5, 0), textcoords="offset points", va="center", color="tab:blue")
    axes.set(title=title, xlabel="step", ylabel=f"loss (nats per {'byte' if vocabulary == 256 else 'token'})")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    return figure
