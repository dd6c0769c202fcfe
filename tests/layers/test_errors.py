"""Every refusal of the layer: the rule, what it got, and the remedy, eagerly and under jit."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmoe

D, F = 8, 12
ROUTER = jaxmoe.RouterConfig(num_experts=8, top_k=2)
CONFIG = jaxmoe.MoEConfig(router=ROUTER)


def _params(num_experts=8, dtype=jnp.float32):
    return jaxmoe.init_params(jax.random.key(0), D, F, jaxmoe.RouterConfig(num_experts=num_experts, top_k=2), dtype)


def _mesh(n=4, axis="expert", axis_type=AxisType.Auto):
    return jaxmoe.make_mesh(n, axis=axis, axis_type=axis_type)


def _config(**changes):
    return dataclasses.replace(CONFIG, **changes)


X = jnp.ones((8, D))
IDS = jnp.zeros((8, 2), jnp.int32)
# name: (arguments of jaxmoe.moe, the rule, what it got, the remedy)
REFUSALS = {
    "experts not divisible": (
        lambda: dict(
            params=_params(10), x=X, config=_config(router=jaxmoe.RouterConfig(num_experts=10, top_k=2)), mesh=_mesh(4)
        ),
        "must be a multiple of the ranks",
        "10 experts on 4 ranks",
        "Use 8 or 12 experts, or an EP size that divides 10",
    ),
    "wrong mesh axis": (
        lambda: dict(params=_params(), x=X, config=CONFIG, mesh=_mesh(4, axis="model")),
        "axis must name axes of the mesh",
        "['expert'] on a mesh with axes ('model',)",
        "Pass axis='model'",
    ),
    "axis named twice": (
        lambda: dict(params=_params(), x=X, config=_config(axis=("expert", "expert")), mesh=_mesh()),
        "each mesh axis once",
        "('expert', 'expert')",
        "Remove",
    ),
    "integer tokens": (
        lambda: dict(params=_params(), x=X.astype(jnp.int32), config=CONFIG),
        "x must be float32, bfloat16 or float16",
        "int32",
        "x.astype(jnp.bfloat16)",
    ),
    "fp8 tokens": (
        lambda: dict(params=_params(), x=X.astype(jnp.float8_e4m3fn), config=CONFIG),
        "x must be float32, bfloat16 or float16",
        "float8_e4m3fn",
        "Cast it",
    ),
    "two dtypes": (
        lambda: dict(params=_params(dtype=jnp.bfloat16), x=X, config=CONFIG),
        "must have one dtype",
        "x float32 and gate_up bfloat16",
        "Cast one",
    ),
    "tokens without width": (
        lambda: dict(params=_params(), x=X[0], config=CONFIG),
        "at least one token dimension",
        "(8,)",
        "x[None]",
    ),
    "another width": (
        lambda: dict(params=_params(), x=jnp.ones((8, D + 1)), config=CONFIG),
        "router must have shape (9, 8)",
        "(8, 8)",
        "jaxmoe.init_params",
    ),
    "another number of experts": (
        lambda: dict(params=_params(4), x=X, config=CONFIG),
        "router must have shape (8, 8)",
        "(8, 4)",
        "mend num_experts",
    ),
    "tokens that do not divide": (
        lambda: dict(params=_params(), x=jnp.ones((6, D)), config=CONFIG, mesh=_mesh(4)),
        "dimension 0 of x must be a multiple of the 4 ranks",
        "got 6",
        "Pad it to 8 and mark the padding with mask=",
    ),
    "token_spec without the expert axis": (
        lambda: dict(params=_params(), x=X, config=_config(token_spec=P(None)), mesh=_mesh(4)),
        "must be sharded over the expert axes ('expert',)",
        "token_spec is",
        "pass token_spec=P('expert')",
    ),
    "token_spec too long": (
        lambda: dict(params=_params(), x=X, config=_config(token_spec=P("expert", None)), mesh=_mesh(4)),
        "must not name the model dimension",
        "(8, 8)",
        "token_spec",
    ),
    "explicit: tokens not sharded": (
        lambda: dict(params=_placed(), x=X, config=CONFIG, mesh=_mesh(4, axis_type=AxisType.Explicit)),
        "must be sharded over the expert axes ('expert',)",
        "the type of x says",
        "x = jax.reshard(x, jax.P('expert'))",
    ),
    "explicit: experts not sharded": (
        lambda: dict(params=_params(), x=X, config=CONFIG, mesh=_mesh(4, axis_type=AxisType.Explicit)),
        "must be sharded as",
        "gate_up",
        "jax.reshard(gate_up",
    ),
    "counts of the wrong shape": (
        lambda: dict(params=_params(), x=X, config=CONFIG, mesh=_mesh(4), num_valid=jnp.array([1, 2])),
        "an integer per rank that holds tokens, shape (4,)",
        "int32[2]",
        "jnp.array",
    ),
    "counts and mask": (
        lambda: dict(params=_params(), x=X, config=CONFIG, num_valid=jnp.array([1]), mask=jnp.ones((8,), bool)),
        "num_valid or mask, not both",
        "got both",
        "Put the counts into the mask",
    ),
    "mask of the wrong dtype": (
        lambda: dict(params=_params(), x=X, config=CONFIG, mask=jnp.ones((8,))),
        "mask must be bool[8]",
        "float32[8]",
        "mask.astype(bool)",
    ),
    "routing of the wrong shape": (
        lambda: dict(params=_params(), x=X, config=CONFIG, routing=jaxmoe.Routing(IDS[:4], jnp.ones((4, 2)))),
        "routing must have ids and weights [8, 'K']",
        "[4, 2]",
        "Reshape",
    ),
    "routing of the wrong dtype": (
        lambda: dict(params=_params(), x=X, config=CONFIG, routing=jaxmoe.Routing(IDS, jnp.ones((8, 2), jnp.bfloat16))),
        "int32 ids and float32 weights",
        "int32 and bfloat16",
        "Cast them",
    ),
    "unknown transport": (
        lambda: dict(params=_params(), x=X, config=_config(transport="carrier pigeon")),
        "transport must be one of",
        "carrier pigeon",
        "'all_gather', always works",
    ),
    "unknown experts": (
        lambda: dict(params=_params(), x=X, config=_config(experts="cutlass")),
        "experts backend must be one of",
        "cutlass",
        "None to let jaxmoe choose",
    ),
}


def _placed():
    mesh = _mesh(4, axis_type=AxisType.Explicit)
    params = _params()
    return jax.tree.map(lambda a, s: jax.device_put(a, jax.NamedSharding(mesh, s)), params, params.specs(("expert",)))


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("under_jit", [False, True], ids=["eager", "jit"])
def test_refusal(name, under_jit):
    make, *parts = REFUSALS[name]
    arguments = make()
    static = {k: arguments.pop(k) for k in ("config", "mesh") if k in arguments}
    run = lambda kw: jaxmoe.moe(**kw, **static)  # noqa: E731
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        (jax.jit(run) if under_jit else run)(arguments)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is missing in: {caught.value}"


def test_repeated_ids_are_refused_when_checks_are_on():
    ids = IDS.at[:, 1].set(1).at[3].set(jnp.array([5, 5]))
    routing = jaxmoe.Routing(ids, jnp.ones((8, 2)))
    with pytest.raises(ValueError, match=re.escape("got ids [5, 5]")):
        jaxmoe.moe(_params(), X, _config(checks=True), routing=routing)
    y, _ = jaxmoe.moe(_params(), X, CONFIG, routing=routing)
    assert y.shape == X.shape


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"capacity": 0}, "capacity must be a positive integer; got 0. Pass capacity=1 or more"),
        ({"combine_dtype": "int8"}, "combine_dtype must be a float dtype of 16 bits or more; got 'int8'. Use float32"),
        ({"combine_dtype": "float8_e4m3fn"}, "got 'float8_e4m3fn'. Use float32, bfloat16 or None; for fp8"),
    ],
    ids=str,
)
def test_config_refuses(fields, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        _config(**fields)


def test_configs_take_keywords_only():
    with pytest.raises(TypeError):
        jaxmoe.RouterConfig(8, 2)


@pytest.mark.parametrize("args", [dict(ep_size=9), dict(ep_size=4, data=3), dict(ep_size=0)], ids=str)
def test_make_mesh_refuses(args):
    with pytest.raises(ValueError, match=r"1 <= data × ep_size <= devices; got .*8 devices.*jax_num_cpu_devices"):
        jaxmoe.make_mesh(**args)
