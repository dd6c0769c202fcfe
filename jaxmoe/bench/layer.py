"""`jaxmoe bench layer`: the whole MoE layer on one GPU, all experts local, beside its parts and a PyTorch layer."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxmoe
from jaxmoe.bench import harness, torch_baseline
from jaxmoe.experts import expert_down_activated, expert_up_activated
from jaxmoe.layers.on_rank import route
from jaxmoe.permute import combine_rows, permute
from jaxmoe.routing import row_map

# case: T, D, F, E, K.
GPU_SHAPES = {
    "Qwen3-30B-A3B T=8192": (8192, 2048, 768, 128, 8),
    "Qwen3-30B-A3B T=1024": (1024, 2048, 768, 128, 8),
    "Mixtral-8x7B T=4096": (4096, 4096, 14336, 8, 2),
}
CPU_SHAPES = {"small": (64, 64, 128, 8, 2)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_case_argument(parser, GPU_SHAPES)
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    shapes = harness.chosen_cases(args, GPU_SHAPES, CPU_SHAPES)
    rows: list[harness.Row] = []
    for case in shapes:
        rows += measure(case, *shapes[case])
    harness.report(rows, args)
    return 0


def _layer(config, params, x, dy) -> dict[str, Callable[[], Any]]:
    """The layer forward, and forward with all gradients."""

    def forward(params, x):
        return jaxmoe.moe(params, x, config)[0]

    def training(params, x, dy):
        return jax.vjp(forward, params, x)[1](dy)

    return {
        "forward": functools.partial(jax.jit(forward), params, x),
        "forward + backward": functools.partial(jax.jit(training), params, x, dy),
    }


def _parts(config, params, x) -> dict[str, Callable[[], Any]]:
    """The layer's parts, each alone: route + row map, permute, up with SwiGLU, down, combine."""
    (T, K), E = (x.shape[0], config.router.top_k), config.router.num_experts

    def plan(params, x):
        routing = route(params, x, config, None)
        return routing.weights, row_map(routing.expert_ids, 0, E, T * min(K, E))

    weights, maps = jax.jit(plan)(params, x)
    rows = jax.jit(permute)(x, maps)
    up = jax.jit(lambda x, w, m: expert_up_activated(x, w, m, config.experts))
    down = jax.jit(lambda h, w, s, m: expert_down_activated(h, w, s, m, config.experts))
    h = up(x, params.gate_up, maps)
    return {
        "part: route and row map": functools.partial(jax.jit(plan), params, x),
        "part: permute": functools.partial(jax.jit(permute), x, maps),
        "part: permute + up + SwiGLU": functools.partial(up, x, params.gate_up, maps),
        "part: down + combine": functools.partial(down, h, params.down, weights, maps),
        "part: combine": functools.partial(jax.jit(combine_rows), rows, weights, maps),
    }


def measure(case: str, T: int, D: int, F: int, E: int, K: int) -> list[harness.Row]:
    """Layer, parts and PyTorch by turns; the ceiling is a dense product of the experts' size."""
    router = jaxmoe.RouterConfig(num_experts=E, top_k=K)
    dtype = jnp.bfloat16
    params = jax.jit(lambda: jaxmoe.init_params(jax.random.key(0), D, F, router, dtype))()
    x, dy = (jax.random.normal(jax.random.key(i), (T, D), dtype) for i in (1, 2))
    config = jaxmoe.MoEConfig(router=router, axis=None)
    functions = {f"jaxmoe|{d}": f for d, f in _layer(config, params, x, dy).items()}
    functions |= {f"jaxmoe|{d}": f for d, f in _parts(config, params, x).items()}
    if torch_baseline.available():
        functions |= {f"torch|{d}": f for d, f in torch_baseline.layer(T, D, F, E, K).items()}
    a, b = (
        jax.random.normal(jax.random.key(3), (T * K, D), dtype),
        jax.random.normal(jax.random.key(4), (D, 3 * F), dtype),
    )
    functions["dense|forward"] = functools.partial(jax.jit(jnp.dot), a, b)
    times = harness.time_us(functions)
    flops = 2 * T * K * D * 3 * F
    ceiling = flops / times["dense|forward"] / 1e6
    rows = []
    for name, us in times.items():
        backend, direction = name.split("|")
        if direction.startswith("part:"):
            rows.append(harness.share_row("layer", case, backend, direction, us=us, whole_us=times["jaxmoe|forward"]))
            continue
        work = flops * (3 if "backward" in direction else 1)
        rows.append(harness.row("layer", case, backend, direction, us=us, work=work, unit="TFLOP/s", ceiling=ceiling))
    return rows
