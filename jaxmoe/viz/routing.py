"""Routing: the experts' loads over time, and where the tokens of one batch go."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from numpy.typing import ArrayLike

# Loads are drawn on a logarithmic scale around the even share: from a quarter of it to four times it.
_LOAD_RANGE = 4.0


def expert_load(tokens_per_expert: ArrayLike, *, ranks: int = 1, title: str = "Load of the experts") -> Figure:
    """Heat maps of load[s, e] = tokens[s, e] / mean_e tokens[s, e], a panel a layer, and the fullest expert's below.

    Args:
      tokens_per_expert: [steps, E] or [steps, layers, E] counts.
      ranks: R; lines are drawn between the experts of different ranks.
      title: of the picture.

    Returns:
      A Figure. White is the even share, red is more, blue is less.

    Raises:
      ValueError: another shape, or ranks that do not divide the experts.

    Example:
      >>> expert_load([[3, 1], [2, 2]]).axes[0].get_ylabel()
      'expert'
    """
    counts = np.asarray(tokens_per_expert, np.float64)
    counts = counts[:, None] if counts.ndim == 2 else counts
    if counts.ndim != 3 or not counts.size:
        raise ValueError(
            f"tokens_per_expert must be [steps, E] or [steps, layers, E]; got shape {counts.shape}. "
            "Stack one row of stats.tokens_per_expert a step."
        )
    steps, layers, E = counts.shape
    _check_ranks(E, ranks)
    load = counts / np.maximum(counts.mean(-1, keepdims=True), 1e-12)
    figure = Figure(figsize=(8, 1.2 + 2.3 * layers + 1.7), layout="constrained")
    rows = figure.subplots(layers + 1, 1, sharex=True, squeeze=False, height_ratios=[2.3] * layers + [1.7])[:, 0]
    norm = LogNorm(1 / _LOAD_RANGE, _LOAD_RANGE, clip=True)
    for layer, axes in enumerate(rows[:-1]):
        image = axes.imshow(
            load[:, layer].T,
            aspect="auto",
            origin="lower",
            interpolation="nearest",
            cmap="RdBu_r",
            norm=norm,
            extent=(0.5, steps + 0.5, -0.5, E - 0.5),
        )
        _mark_ranks(axes, E, ranks)
        axes.set(ylabel="expert", title=f"layer {layer}" if layers > 1 else None)
        axes.set_yticks(_some(E))
    bar = figure.colorbar(image, ax=list(rows[:-1]), extend="both", pad=0.015, label="load ÷ even share")
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.yaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4]))
    bar.ax.set_yticklabels(["¼", "½", "even", "2×", "4×"])
    last = rows[-1]
    for layer in range(layers):
        last.plot(
            np.arange(1, steps + 1),
            load[:, layer].max(-1),
            label=f"layer {layer}",
            linewidth=1.5,
            marker="." if steps < 30 else None,
        )
    last.axhline(1, color="0.4", linestyle="--", linewidth=1, label="even")
    last.set(xlabel="step", ylabel="fullest expert\n÷ even share", ylim=(0, max(2.0, 1.05 * load.max())))
    last.legend(frameon=False, ncols=layers + 1, loc="upper right", fontsize="small")
    last.grid(alpha=0.25)
    last.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    return figure


def batch_routing(
    expert_ids: ArrayLike,
    weights: ArrayLike,
    *,
    num_experts: int,
    ranks: int = 1,
    token_labels: list[str] | None = None,
    title: str = "Routing of a batch",
) -> Figure:
    """The weight of every (token, expert) pair, tokens along x, and each expert's tokens beside it.

    Args:
      expert_ids: [..., K] int; -1 is no expert.
      weights: [..., K].
      num_experts: E.
      ranks: R; lines separate the experts of different ranks.
      token_labels: a word a token; drawn below where there are at most 64.
      title: of the picture.

    Returns:
      A Figure.

    Raises:
      ValueError: shapes that differ, ids out of range, or ranks that do not divide the experts.

    Example:
      >>> batch_routing([[0, 1], [1, 2]], [[0.7, 0.3], [0.5, 0.5]], num_experts=4, ranks=2).axes[0].get_xlabel()
      'token'
    """
    ids, w = np.asarray(expert_ids), np.asarray(weights, np.float64)
    if ids.shape != w.shape or ids.ndim < 2:
        raise ValueError(
            f"expert_ids and weights must both be [..., K]; got {ids.shape} and {w.shape}. "
            "Pass stats.routing's two arrays."
        )
    ids, w = ids.reshape(-1, ids.shape[-1]), w.reshape(-1, ids.shape[-1])
    if ids.max(initial=-1) >= num_experts:
        raise ValueError(f"expert_ids must be below num_experts = {num_experts}; got {ids.max()}. Mend num_experts.")
    _check_ranks(num_experts, ranks)
    dense = np.zeros((num_experts, ids.shape[0]))
    token, slot = np.nonzero(ids >= 0)
    np.add.at(dense, (ids[token, slot], token), w[token, slot])
    tokens = np.bincount(ids[ids >= 0], minlength=num_experts)

    figure = Figure(figsize=(9, min(8.0, 1.6 + 0.19 * num_experts)), layout="constrained")
    main, side = figure.subplots(1, 2, sharey=True, width_ratios=[5, 1])
    image = main.imshow(
        np.ma.masked_equal(dense, 0.0),
        aspect="auto",
        interpolation="nearest",
        cmap="viridis_r",
        vmin=0,
        vmax=max(dense.max(), 1e-12),
    )
    _mark_ranks(main, num_experts, ranks, named=True)
    main.set(xlabel="token", ylabel="expert", title=title)
    main.set_yticks(_some(num_experts))
    if token_labels is not None and ids.shape[0] <= 64:
        main.set_xticks(range(ids.shape[0]), token_labels, family="monospace", fontsize="small")
    figure.colorbar(image, ax=main, location="left", pad=0.02, label="routing weight", shrink=0.9)
    side.barh(range(num_experts), tokens, color="tab:blue", height=0.8)
    even = tokens.sum() / num_experts
    side.axvline(even, color="0.3", linestyle="--", linewidth=1)
    side.set(xlabel="tokens", title=f"even share: {even:.3g}")
    side.title.set_fontsize("small")
    _mark_ranks(side, num_experts, ranks)
    side.tick_params(labelleft=False)
    side.spines[["top", "right"]].set_visible(False)
    return figure


def _check_ranks(E: int, ranks: int) -> None:
    if ranks < 1 or E % ranks:
        raise ValueError(
            f"ranks must divide the experts; got {ranks} ranks and {E} experts. Pass ranks=1 for no lines."
        )


def _mark_ranks(axes: Axes, E: int, ranks: int, *, named: bool = False) -> None:
    """Thin lines between the experts of different ranks, and the ranks' names at the right edge."""
    L = E // ranks
    for r in range(1, ranks):
        axes.axhline(r * L - 0.5, color="0.35", linewidth=0.6)
    if named and 1 < ranks <= 16:
        for r in range(ranks):
            axes.text(
                1.005,
                r * L + (L - 1) / 2,
                f"rank {r}",
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize="x-small",
                color="0.35",
            )


def _some(n: int) -> np.ndarray:
    """At most 17 evenly spaced ids to label."""
    return np.arange(0, n, max(1, -(-n // 16)))
