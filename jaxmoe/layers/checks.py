"""The refusals of the MoE layer: each says the rule, what it got, and the remedy."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmoe.config import MoEConfig
from jaxmoe.layers.params import MoEParams
from jaxmoe.mesh import AnyMesh, check_axes, mesh_size


def check_arrays(params: MoEParams, x: jax.Array, config: MoEConfig) -> None:
    """Raise unless shapes and dtypes of parameters and tokens fit each other and the configuration."""
    E = config.router.num_experts
    if x.ndim < 2:
        raise ValueError(f"x must be [..., D] with at least one token dimension; got shape {x.shape}. Pass x[None].")
    D, F = x.shape[-1], params.down.shape[1]
    for name, array in (("x", x), ("gate_up", params.gate_up), ("down", params.down)):
        if not jnp.issubdtype(array.dtype, jnp.floating) or jnp.finfo(array.dtype).bits < 16:
            raise ValueError(
                f"{name} must be float32, bfloat16 or float16; got {array.dtype}. Cast it: {name}.astype(jnp.bfloat16)."
            )
        if array.dtype != x.dtype:
            raise ValueError(
                f"x and the experts must have one dtype; got x {x.dtype} and {name} {array.dtype}. Cast one of them "
                f"(jaxmoe.layers.MoE does it for you: MoE(dtype=jnp.{x.dtype}))."
            )
    for name, array, shape in (
        ("router", params.router, (D, E)),
        ("gate_up", params.gate_up, (E, D, 2 * F)),
        ("down", params.down, (E, F, D)),
    ):
        if array.shape != shape:
            raise ValueError(
                f"{name} must have shape {shape} for x of width {D} and {E} experts of width {F}; got {array.shape}. "
                "Make the parameters with jaxmoe.init_params, or mend num_experts."
            )


def token_spec(x: jax.Array, config: MoEConfig, mesh: AnyMesh, axes: tuple[str, ...]) -> P:
    """How the leading dimensions of x are sharded: from its type on Explicit axes, else from the configuration."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if axes and all(types[a] == AxisType.Explicit for a in axes):
        sharding = jax.typeof(x).sharding
        spec = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
        lead, what = P(*spec[:-1]), f"the type of x says {sharding.spec}"
        remedy = f"x = jax.reshard(x, jax.P({axes if len(axes) > 1 else axes[0]!r}))"
        if spec[-1] is not None:
            raise ValueError(
                f"the model dimension of x must not be sharded; got {sharding.spec}. Reshard it first: {remedy}."
            )
    else:
        lead = config.token_spec if config.token_spec is not None else P(axes or None)
        lead = P(*lead, *(None,) * (x.ndim - 1 - len(lead)))
        what, remedy = f"config.token_spec is {lead}", f"pass token_spec=P({axes[0] if axes else None!r})"
    if len(lead) != x.ndim - 1:
        raise ValueError(
            f"token_spec must not name the model dimension of x; got {lead} for shape {x.shape}. {remedy}."
        )
    over = _names(lead)
    check_axes(mesh, over)
    if not set(axes) <= set(over):
        raise ValueError(
            f"the token dimensions of x must be sharded over the expert axes {axes}; {what}, with x of shape "
            f"{x.shape}. Do this first: {remedy}."
        )
    _check_divides(x.shape[:-1], lead, mesh)
    return lead


def _names(spec: P) -> tuple[str, ...]:
    return tuple(a for part in spec if part is not None for a in ((part,) if isinstance(part, str) else part))


def token_axes(spec: P) -> tuple[str, ...]:
    """All mesh axes over which tokens are sharded, in order."""
    return _names(spec)


def _check_divides(shape: tuple[int, ...], spec: P, mesh: AnyMesh) -> None:
    for dim, (size, part) in enumerate(zip(shape, spec, strict=True)):
        ranks = mesh_size(mesh, _names(P(part)))
        if size % ranks:
            raise ValueError(
                f"dimension {dim} of x must be a multiple of the {ranks} ranks on {part!r}; got {size}. Pad it to "
                f"{-(-size // ranks) * ranks} and mark the padding with mask=, or shard another dimension (token_spec)."
            )


def check_experts(config: MoEConfig, mesh: AnyMesh, axes: tuple[str, ...]) -> None:
    """Raise unless the EP axes exist and divide the experts."""
    check_axes(mesh, axes)
    R, E = mesh_size(mesh, axes), config.router.num_experts
    if E % R:
        raise ValueError(
            f"num_experts must be a multiple of the ranks on axis {axes}; got {E} experts on {R} ranks. Use "
            f"{E // R * R or R} or {-(-E // R) * R} experts, or an EP size that divides {E} "
            f"({[d for d in range(1, R + 1) if E % d == 0]})."
        )


def check_explicit_params(params: MoEParams, mesh: AnyMesh, axes: tuple[str, ...]) -> None:
    """On Explicit meshes: raise unless the parameters lie as `params.specs(axes)` says."""
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if not axes or not all(types[a] == AxisType.Explicit for a in axes):
        return
    want = params.specs(axes)
    for name in ("router", "gate_up", "down", "bias"):
        array = getattr(params, name)
        if array is None:
            continue
        got, spec = tuple(jax.typeof(array).sharding.spec), tuple(getattr(want, name))
        got += (None,) * (array.ndim - len(got))
        got = tuple((g,) if isinstance(g, str) else g for g in got)
        spec = tuple((s,) if isinstance(s, str) else s for s in spec)
        if got != spec:
            raise ValueError(
                f"{name} must be sharded as {getattr(want, name)} on an Explicit mesh; got "
                f"{jax.typeof(array).sharding.spec}. Place it: jax.reshard({name}, jax.{getattr(want, name)})."
            )


def check_valid(num_valid, mask, x: jax.Array, shards: int) -> None:
    """Raise unless `num_valid` and `mask` have the shapes and dtypes that go with x."""
    if num_valid is not None:
        if num_valid.shape != (shards,) or not jnp.issubdtype(num_valid.dtype, jnp.integer):
            raise ValueError(
                f"num_valid must be an integer per rank that holds tokens, shape ({shards},); got {num_valid.dtype}"
                f"{list(num_valid.shape)}. Pass jnp.array([...], jnp.int32), in mesh order."
            )
        if mask is not None:
            raise ValueError("pass num_valid or mask, not both; got both. Put the counts into the mask.")
    if mask is not None and (mask.shape != x.shape[:-1] or mask.dtype != jnp.bool_):
        raise ValueError(
            f"mask must be bool{list(x.shape[:-1])}, the shape of x without its width; got {mask.dtype}"
            f"{list(mask.shape)}. Use mask.astype(bool)."
        )


def check_given_routing(routing, x: jax.Array) -> None:
    """Raise unless a caller's routing has ids int32 and weights float32 of shape [..., K]."""
    ids, weights = routing.expert_ids, routing.weights
    if ids.shape[:-1] != x.shape[:-1] or ids.shape != weights.shape:
        raise ValueError(
            f"routing must have ids and weights {[*x.shape[:-1], 'K']}; got {list(ids.shape)} and "
            f"{list(weights.shape)}. Reshape them like the tokens."
        )
    if ids.dtype != jnp.int32 or weights.dtype != jnp.float32:
        raise ValueError(
            f"routing must have int32 ids and float32 weights; got {ids.dtype} and {weights.dtype}. Cast them."
        )


def num_shards(mesh: AnyMesh | None, axes: tuple[str, ...]) -> int:
    """The ranks that hold different tokens."""
    return 1 if mesh is None else math.prod(mesh.shape[a] for a in axes)
