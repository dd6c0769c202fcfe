"""The MoE layer as a Flax nnx module."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmoe.config import MoEConfig, RouterConfig
from jaxmoe.layers.functional import moe
from jaxmoe.layers.params import MoEParams, MoEStats
from jaxmoe.mesh import AnyMesh, axis_tuple, current_mesh
from jaxmoe.routing.gating import Routing
from jaxmoe.schedules import Schedule, Sequential

# Fan-in is the width a product runs over: the second last dimension, for the router and for each expert alone.
default_kernel_init = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1)
_expert_kernel_init = nnx.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=(0,)
)


class RouterBias(nnx.Variable):
    """The selection bias [E]: state, not a parameter, since no gradient reaches it (DeepSeek-V3)."""


class MoE(nnx.Module):
    """Mixture of SwiGLU experts, spread over a mesh axis.

        logits = x @ router;  ids, weights = gate(logits)
        y[n] = Σ_k weights[n, k] · (silu(x[n] G_e) · (x[n] U_e)) D_e,   e = ids[n, k]

    Args:
      d_model: D.
      d_ff: F, the width of one expert.
      router: the routing rule, with E and K.
      config: everything else; None is the default for `router` and `axis`.
      schedule: how communication and computation interleave.
      axis: the mesh axis of the experts; a shorthand for `config=MoEConfig(router=…, axis=…)`.
      mesh: None takes the mesh of `jax.set_mesh` at call time.
      use_bias: give the router a selection bias, a `RouterBias` variable of zeros.
      dtype: of the computation; None takes what x and the parameters promote to.
      param_dtype: of the parameters.
      kernel_init: called with (key, shape, dtype) for router [D, E], gate_up [E, D, 2F] and down [E, F, D]; None is
        truncated normal with variance 1 / fan-in, per expert.
      rngs: nnx random streams; "params" is used.

    Raises:
      ValueError: `config` and the shorthands contradict each other.

    Example:
      >>> import jax.numpy as jnp, jaxmoe
      >>> from flax import nnx
      >>> layer = MoE(16, 32, jaxmoe.RouterConfig(num_experts=8, top_k=2), rngs=nnx.Rngs(0))
      >>> y, stats = layer(jnp.ones((2, 5, 16)))
      >>> y.shape, int(stats.dropped)
      ((2, 5, 16), 0)

    References: Mixtral (2024), Qwen3 (2025) and DeepSeek-V3 (2024) for the block; DESIGN of jaxmoe for the schedules.
    """

    router: nnx.Param
    gate_up: nnx.Param
    down: nnx.Param
    bias: RouterBias | None

    def __init__(  # noqa: PLR0913 (Flax's layers take dtype, param_dtype, kernel_init and rngs beside their own)
        self,
        d_model: int,
        d_ff: int,
        router: RouterConfig,
        *,
        config: MoEConfig | None = None,
        schedule: Schedule | None = None,
        axis: str | tuple[str, ...] | None = "expert",
        mesh: AnyMesh | None = None,
        use_bias: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Callable | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if config is None:
            config = MoEConfig(router=router, axis=axis)
        elif axis not in ("expert", config.axis):
            raise ValueError(f"config.axis must be the axis given; got {config.axis!r} and {axis!r}. Pass only config.")
        elif config.router != router:
            raise ValueError(
                f"config.router must be the router given; got {config.router} and {router}. Pass "
                "MoE(d_model, d_ff, config.router, config=config)."
            )
        self.config, self.schedule, self.mesh = config, schedule or Sequential(), mesh
        self.dtype, self.param_dtype = dtype, param_dtype
        E = router.num_experts
        shapes = {"router": (d_model, E), "gate_up": (E, d_model, 2 * d_ff), "down": (E, d_ff, d_model)}
        values = {
            name: (kernel_init or (default_kernel_init if name == "router" else _expert_kernel_init))(
                rngs.params(), shape, param_dtype
            )
            for name, shape in shapes.items()
        }
        self.router = nnx.Param(self._whole(values["router"]))
        self.gate_up, self.down = self._spread(values["gate_up"]), self._spread(values["down"])
        bias = RouterBias(self._whole(jnp.zeros((E,), jnp.float32))) if use_bias else None
        self.bias = nnx.data(bias)

    def _mesh_at_hand(self) -> AnyMesh | None:
        """The mesh on which to place variables, if there is one."""
        return current_mesh(self.mesh) if axis_tuple(self.config.axis) else None

    def _spread(self, value: jax.Array) -> nnx.Param:
        """A parameter whose first dimension, the experts, lies over the EP axes.

        The specs end where they are trivial, as XLA returns them: P("expert"), not P("expert", None, None). Otherwise
        the second step of a training loop would see other shardings than the first, and compile again.
        """
        if self._mesh_at_hand() is None:
            return nnx.Param(value)
        axes = axis_tuple(self.config.axis)
        metadata: dict[str, Any] = {"out_sharding": (axes if len(axes) > 1 else axes[0],)}
        if self.mesh is not None:
            metadata["mesh"] = self.mesh
        return nnx.Param(value, **metadata)

    def _whole(self, value: jax.Array) -> jax.Array:
        """`value` on every device of the mesh."""
        mesh = self._mesh_at_hand()
        if mesh is None:
            return value
        everywhere = jax.NamedSharding(mesh, PartitionSpec())
        if mesh.are_all_axes_explicit:
            return jax.reshard(value, everywhere)
        return lax.with_sharding_constraint(value, everywhere)

    def params(self, dtype: DTypeLike | None = None) -> MoEParams:
        """The layer's arrays for `jaxmoe.moe`; experts cast to `dtype`, the router as it is."""
        gate_up, down = self.gate_up[...], self.down[...]
        if dtype is not None:
            gate_up, down = gate_up.astype(dtype), down.astype(dtype)
        return MoEParams(self.router[...], gate_up, down, None if self.bias is None else self.bias[...])

    def __call__(
        self,
        x: Float[Array, "... D"],
        *,
        num_valid: Int[Array, "R"] | None = None,
        mask: Bool[Array, "..."] | None = None,
        routing: Routing | None = None,
    ) -> tuple[Float[Array, "... D"], MoEStats]:
        """Apply the layer; arguments and returns as `jaxmoe.moe`, y in the computation's dtype."""
        dtype = self.dtype or jnp.promote_types(x.dtype, self.param_dtype)
        return moe(
            self.params(dtype),
            x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            self.config,
            schedule=self.schedule,
            mesh=self.mesh,
            num_valid=num_valid,
            mask=mask,
            routing=routing,
        )


def with_schedule(layer: MoE, schedule: Schedule) -> MoE:
    """A layer with the same variables and another schedule.

    Example:
      >>> import jaxmoe
      >>> from flax import nnx
      >>> layer = MoE(4, 8, jaxmoe.RouterConfig(num_experts=2, top_k=1), rngs=nnx.Rngs(0))
      >>> with_schedule(layer, jaxmoe.TokenChunks(2)).schedule
      TokenChunks(n=2)
    """
    graph, state = nnx.split(layer)
    copy = nnx.merge(graph, state)
    copy.schedule = schedule
    return copy


def with_config(layer: MoE, **changes) -> MoE:
    """A layer with the same variables and fields of its `MoEConfig` changed, for comparing transports.

    Example:
      >>> import jaxmoe
      >>> from flax import nnx
      >>> layer = MoE(4, 8, jaxmoe.RouterConfig(num_experts=2, top_k=1), rngs=nnx.Rngs(0))
      >>> with_config(layer, transport="naive").config.transport
      'naive'
    """
    graph, state = nnx.split(layer)
    copy = nnx.merge(graph, state)
    copy.config = dataclasses.replace(layer.config, **changes)
    return copy
