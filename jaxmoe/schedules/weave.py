"""The one executor of schedules: it issues stages of several lanes in a given order, and XLA keeps that order.

A schedule is data: stages, lanes, and two issue orders, one for forward and one for backward. For each slot (lane,
stage) the lane's value is tied, with `lax.optimization_barrier`, behind other slots' results:

  comm:     the comm slot before it, and the compute slot issued last before it
  compute:  the compute slot before it, and the comm slot before the latest one issued

So one collective is in flight at a time and its window is fixed from both sides: it cannot start before its place, and
computation of the next window cannot slip into this one. Without the ties XLA merges the lanes' products and their
reduce-scatters, and no overlap is left. `jax.grad` through a chain of barriers does not keep an order, so the backward
list is written too, and both run inside one `custom_vjp`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Slot = tuple[int, int]
Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One pure function of a block.

    Attributes:
      name: for reports.
      kind: "compute" or "comm".
      fn: (parameters, own, value) -> value. `parameters` is the sub-dict of the shared parameters that `reads` names,
        `own` what the lane carries beside its value (row maps, combine weights).
      reads: the shared parameters it uses. Only these get a gradient from it.
      primal: used in place of `fn` where no gradient is taken, None for `fn` itself. The values between stages may
        then be others (an expert's activations in place of its pre-activations); the lane's last value may not.
    """

    name: str
    kind: Literal["compute", "comm"]
    fn: Callable[[dict[str, Tree], Tree, Tree], Tree]
    reads: tuple[str, ...] = ()
    primal: Callable[[dict[str, Tree], Tree, Tree], Tree] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """The issue orders of a schedule over `num_lanes` lanes and `num_stages` stages.

    Attributes:
      forward: slots (lane, stage), every one once, a lane's stages ascending.
      backward: the same slots, a lane's stages descending.

    Raises:
      ValueError: a slot is missing, repeated, or before one that it needs.
    """

    num_lanes: int
    num_stages: int
    forward: tuple[Slot, ...]
    backward: tuple[Slot, ...]

    def __post_init__(self) -> None:
        for name, order, stages in (
            ("forward", self.forward, list(range(self.num_stages))),
            ("backward", self.backward, list(reversed(range(self.num_stages)))),
        ):
            for lane in range(self.num_lanes):
                got = [s for at, s in order if at == lane]
                if got != stages:
                    raise ValueError(
                        f"the {name} order must issue every stage of a lane once, in the order {stages}; got {got} for "
                        f"lane {lane}. Mend the order."
                    )
            if len(order) != self.num_lanes * self.num_stages:
                raise ValueError(
                    f"the {name} order must have {self.num_lanes * self.num_stages} slots, for {self.num_lanes} lanes "
                    f"of {self.num_stages} stages; got {len(order)}. Remove the slots of other lanes."
                )


class _Ties:
    """What the next slot must come behind."""

    def __init__(self) -> None:
        self.comm: Tree = None
        self.comm_before: Tree = None
        self.compute: Tree = None

    def tie(self, kind: str, value: Tree) -> Tree:
        """`value`, unchanged, not available before the results that a slot of this kind must come behind."""
        behind = (self.comm, self.compute) if kind == "comm" else (self.compute, self.comm_before)
        behind = tuple(b for b in behind if b is not None)
        return lax.optimization_barrier((value, *behind))[0] if behind else value

    def done(self, kind: str, result: Tree) -> None:
        """Record a slot's result."""
        if kind == "comm":
            self.comm_before, self.comm = self.comm, result
        else:
            self.compute = result


def _split(tree: Tree) -> tuple[Tree, Tree]:
    """The float leaves of `tree`, and the others; each with None at the other's places."""
    is_float = jax.tree.map(lambda a: jnp.issubdtype(a.dtype, jnp.inexact), tree)
    floats = jax.tree.map(lambda a, f: a if f else None, tree, is_float)
    return floats, jax.tree.map(lambda a, f: None if f else a, tree, is_float)


def _join(floats: Tree, others: Tree) -> Tree:
    return jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda a: a is None)


def _add(total: Tree, more: Tree) -> Tree:
    return more if total is None else jax.tree.map(jnp.add, total, more)


def weave(
    stages: Sequence[Stage],
    orders: Orders,
    shared: Mapping[str, Tree],
    own: Sequence[Tree],
    values: Sequence[Tree],
) -> tuple[Tree, ...]:
    """values[i] <- stages[S-1](… stages[0](values[i])) for every lane i, issued in `orders`, forward and backward.

    Args:
      stages: S stages, the same for every lane.
      orders: the issue orders for these lanes and stages.
      shared: parameters by name, float arrays; gradients of all lanes are added in the parameter's dtype, in the order
        of the backward list.
      own: one pytree a lane. Float leaves get gradients, integer ones none.
      values: one pytree of float arrays a lane.

    Returns:
      The lanes' final values.

    Raises:
      ValueError: the orders are for another number of lanes or stages.

    Example:
      >>> import jax.numpy as jnp
      >>> double = Stage(name="double", kind="compute", fn=lambda p, own, v: v * p["w"], reads=("w",))
      >>> order = Orders(num_lanes=2, num_stages=1, forward=((0, 0), (1, 0)), backward=((1, 0), (0, 0)))
      >>> weave([double], order, {"w": jnp.array(2.0)}, [(), ()], [jnp.array(1.0), jnp.array(3.0)])
      (Array(2., dtype=float32, weak_type=True), Array(6., dtype=float32, weak_type=True))

    References: dual micro-batches of DeepSeek-V3 (2024); two-stream issue orders as in DeepEP and SGLang.
    """
    if (orders.num_lanes, orders.num_stages) != (len(values), len(stages)) or len(own) != len(values):
        raise ValueError(
            f"orders must be made for the lanes and stages given; got {orders.num_lanes} lanes × {orders.num_stages} "
            f"stages for {len(values)} values, {len(own)} owns and {len(stages)} stages. Make the orders anew."
        )
    own_floats, own_others = _split(tuple(own))

    def run_primal(shared, own_floats, own_others, values):
        x, ties = list(values), _Ties()
        for lane, s in orders.forward:
            stage = stages[s]
            parameters = {name: shared[name] for name in stage.reads}
            call = stage.primal or stage.fn
            x[lane] = call(parameters, _join(own_floats[lane], own_others[lane]), ties.tie(stage.kind, x[lane]))
            ties.done(stage.kind, x[lane])
        return tuple(x)

    def run_forward(shared, own_floats, own_others, values):
        x, ties, pullbacks = list(values), _Ties(), {}
        for lane, s in orders.forward:
            stage, others = stages[s], own_others[lane]
            parameters = {name: shared[name] for name in stage.reads}

            def call(p, o, v, stage=stage, others=others):
                return stage.fn(p, _join(o, others), v)

            tied = ties.tie(stage.kind, x[lane])
            x[lane], pullbacks[lane, s] = jax.vjp(call, parameters, own_floats[lane], tied)
            ties.done(stage.kind, x[lane])
        return tuple(x), pullbacks

    def run_backward(pullbacks, cotangents):
        g, ties = list(cotangents), _Ties()
        d_shared: dict[str, Tree] = dict.fromkeys(shared)
        d_own: list[Tree] = [None] * len(g)
        for lane, s in orders.backward:
            tied = ties.tie(stages[s].kind, g[lane])
            d_parameters, d_lane, g[lane] = pullbacks[lane, s](tied)
            for name, d in d_parameters.items():
                d_shared[name] = _add(d_shared[name], d)
            d_own[lane] = _add(d_own[lane], d_lane)
            ties.done(stages[s].kind, g[lane])
        return d_shared, tuple(d_own), None, tuple(g)

    woven = jax.custom_vjp(run_primal)
    woven.defvjp(run_forward, run_backward)
    return woven(dict(shared), own_floats, own_others, tuple(values))
