"""The check at the end: the same model on one device, every MoE layer replaced by the dense oracle, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

import jaxmoe
from jaxmoe.demo.model import Transformer, next_byte_loss
from jaxmoe.demo.train import loss_and_grads
from jaxmoe.routing import scores_of, select_experts

# ‖a - b‖ / ‖b‖. Sums of some thousand float32 products in another order differ by about 1e-6 here, so 1e-4 is loose by
# a factor of 100; but one token of a batch of 1024 with a wrong expert's output moves its layer by about
# sqrt(1 / 1024) = 3e-2, a factor of 300 over it.
TOLERANCE = 1e-4
# Selections may differ where the scores (in [0, 1]) of two experts are this close: rounding then decides.
NEAR_TIE = 1e-4


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How far the mesh and the oracle are apart on one batch.

    Attributes:
      forward_rel_err: ‖a - b‖ / ‖b‖ of the logits.
      grad_rel_err: the same of every parameter's gradient, by name.
      grad_norm: ‖b‖ of every parameter's gradient.
      tokens: (token, layer) pairs.
      selection_differs: those whose own top-k in the oracle is another set of experts.
      selection_gap: the largest score by which such a choice beats the one it replaces.
      loss: the mesh's, in nats per byte.
    """

    forward_rel_err: float
    grad_rel_err: dict[str, float]
    grad_norm: dict[str, float]
    tokens: int
    selection_differs: int
    selection_gap: float
    loss: float

    @property
    def max_grad_rel_err(self) -> float:
        """The worst parameter's; NaN if any is."""
        return float(np.max(list(self.grad_rel_err.values())))

    @property
    def faults(self) -> list[str]:
        """What is wrong, one sentence each; empty when the oracle agrees. NaN counts as wrong."""
        named = {"the logits": self.forward_rel_err}
        named |= {f"the gradients of {name}": value for name, value in self.grad_rel_err.items()}
        found = [
            f"{what} differ by {value:.1e}, more than {TOLERANCE:.0e}"
            for what, value in named.items()
            if not value <= TOLERANCE
        ]
        if not self.selection_gap <= NEAR_TIE:
            found.append(
                f"a token was sent to an expert whose score is {self.selection_gap:.1e} below the oracle's choice, "
                f"more than a near tie ({NEAR_TIE:.0e})"
            )
        return found


def relative(got: ArrayLike, want: ArrayLike) -> float:
    """‖got - want‖ / ‖want‖ in float64; the plain norm where want is zero."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def selection_gap(
    scores: Float[Array, "N E"], recorded: Int[Array, "N K"], own: Int[Array, "N K"]
) -> Float[Array, "N"]:
    """gap[n] = max score in own[n] but not in recorded[n] - min score in recorded[n] but not in own[n]; 0 if same.

    Example:
      >>> selection_gap(jnp.array([[0.9, 0.75, 0.5]]), jnp.array([[0, 2]]), jnp.array([[0, 1]])).tolist()
      [0.25]
    """
    E = scores.shape[-1]
    was, is_ = (jax.nn.one_hot(ids, E, dtype=jnp.bool_).any(-2) for ids in (recorded, own))
    best = jnp.where(is_ & ~was, scores, -jnp.inf).max(-1)
    worst = jnp.where(was & ~is_, scores, jnp.inf).min(-1)
    return jnp.where((was == is_).all(-1), 0.0, best - worst)


def _dense(i: int, layer: jaxmoe.MoE, h: jax.Array, expert_ids: list[jax.Array]) -> tuple[jax.Array, tuple]:
    """Layer i by the oracle, replaying the recorded choice; beside it the number of other choices, and their gap."""
    params, router = layer.params(jnp.float32), layer.config.router
    y, _ = jaxmoe.dense_moe(params, h.astype(jnp.float32), router, expert_ids=expert_ids[i])
    tokens = h.reshape(-1, h.shape[-1])
    scores = scores_of(jnp.dot(tokens, params.router, precision=router.precision), router)
    own = select_experts(scores, router, params.bias)
    biased = scores if params.bias is None else scores + params.bias
    recorded = expert_ids[i].reshape(own.shape)
    gap = selection_gap(biased, recorded, own)
    differs = (jnp.sort(own, -1) != jnp.sort(recorded, -1)).any(-1).sum()
    return y, (differs, gap.max())


def check(model: Transformer, batch: jax.Array, mesh: jax.sharding.Mesh) -> Verdict:
    """Run the trained model on the mesh and the oracle on its first device, and compare output and gradients.

    Args:
      model: on the mesh.
      batch: [B, S + 1] tokens on the mesh.
      mesh: of the model.

    Returns:
      The verdict.
    """
    with jax.set_mesh(mesh):
        (loss, (logits, stats)), grads = loss_and_grads(model, batch)
    graph, params, *rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def dense(params: nnx.State, rest: list, batch: jax.Array, expert_ids: list) -> tuple:
        def loss(params):
            model = nnx.merge(graph, params, *rest)
            return next_byte_loss(model, batch, lambda i, layer, h: _dense(i, layer, h, expert_ids))

        return jax.value_and_grad(loss, has_aux=True)(params)

    # By way of the host: every array whole on one device, and no mesh anywhere in the oracle's program.
    inputs = jax.device_get((params, rest, batch, [s.routing.expert_ids for s in stats]))
    (_, (want_logits, beside)), want = dense(*jax.device_put(inputs, mesh.devices.flat[0]))
    got_by_name, want_by_name = _by_name(grads), _by_name(want)
    return Verdict(
        forward_rel_err=relative(logits, want_logits),
        grad_rel_err={name: relative(got_by_name[name], want_by_name[name]) for name in want_by_name},
        grad_norm={name: float(np.linalg.norm(value)) for name, value in want_by_name.items()},
        tokens=sum(s.routing.expert_ids[..., 0].size for s in stats),
        selection_differs=sum(int(n) for n, _ in beside),
        selection_gap=max(float(gap) for _, gap in beside),
        loss=float(loss),
    )


def _by_name(state: nnx.State) -> dict[str, np.ndarray]:
    """Arrays by dotted path, such as blocks.0.moe.down."""
    flat = nnx.to_flat_state(state)
    return {".".join(str(p) for p in path): np.asarray(leaf[...]) for path, leaf in flat}
