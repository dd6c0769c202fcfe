"""`jaxmoe bench matmul`: the grouped matmul and its two gradients, every backend, beside a dense product."""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmoe.bench import harness, torch_baseline
from jaxmoe.experts import tokamax
from jaxmoe.experts.api import product, product_dw

# case: M rows, contraction D, columns F, groups G. DeepSeek-V3 as one of 8 ranks has it.
GPU_SHAPES = {
    "Qwen3-30B up": (65536, 2048, 1536, 128),
    "Qwen3-30B down": (65536, 768, 2048, 128),
    "DeepSeek-V3/8 up": (32768, 7168, 4096, 32),
    "DeepSeek-V3/8 down": (32768, 2048, 7168, 32),
    "Mixtral up": (8192, 4096, 28672, 8),
    "Mixtral down": (8192, 14336, 4096, 8),
    "gpt-oss up": (16384, 2880, 5760, 32),
    "Qwen3-30B decode": (1024, 2048, 1536, 128),
}
CPU_SHAPES = {"small": (256, 64, 128, 8)}
# lax.ragged_dot in its dense form takes this many times the FLOPs and an [M, G·D] temporary: left out where larger.
_DENSE_FORM_LIMIT_BYTES = 40e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this benchmark's options."""
    harness.add_case_argument(parser, GPU_SHAPES)
    parser.add_argument("--forward-only", action="store_true", help="leave the gradients out")
    harness.add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    shapes = harness.chosen_cases(args, GPU_SHAPES, CPU_SHAPES)
    rows: list[harness.Row] = []
    for case in shapes:
        rows += measure(case, *shapes[case], forward_only=args.forward_only)
    harness.report(rows, args)
    return 0


def _backends(M: int, D: int, G: int) -> list[str]:
    names = ["pallas"] if harness.on_gpu() else ["reference"]
    names += [] if tokamax.why_not() else ["tokamax"]
    return names + (["xla"] if 2 * M * G * D <= _DENSE_FORM_LIMIT_BYTES or not harness.on_gpu() else [])


def _dense(x, w) -> dict[tuple[str, str], Callable[[], Any]]:
    """The ceiling: one product of the same size by XLA's library and, on a GPU, by JAX's sample Mosaic kernel."""
    out: dict[tuple[str, str], Callable[[], Any]] = {("dense", "forward"): functools.partial(jax.jit(jnp.dot), x, w)}
    if not harness.on_gpu() or w.shape[1] % 512 or x.shape[0] % 256:  # the sample wants whole tiles of a cluster
        return out
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as sample

    dim = sample.MatmulDimension
    choices: tuple[dict[str, Any], ...] = (
        dict(tile_m=64, tile_n=256, wg_dimension=dim.M, cluster_dimension=dim.N),
        dict(tile_m=128, tile_n=128, wg_dimension=dim.N, cluster_dimension=dim.M),
    )
    for tiles in choices:
        config = sample.TuningConfig(
            tile_k=64, max_concurrent_steps=4, grid_minor_dim=dim.M, grid_tile_width=8, **tiles
        )
        name = f"dense, Mosaic sample {tiles['tile_m']}×{tiles['tile_n']}"
        out[name, "forward"] = functools.partial(jax.jit(functools.partial(sample.matmul, c=None, config=config)), x, w)
    return out


def _functions(M: int, D: int, F: int, G: int, forward_only: bool) -> dict[tuple[str, str], Callable[[], Any]]:
    """{(backend, direction): function} on one set of random arrays."""
    dtype = jnp.bfloat16
    normal = jax.jit(lambda i, shape: jax.random.normal(jax.random.key(i), shape, dtype), static_argnums=(1,))
    x, w, dy = normal(0, (M, D)), normal(1, (G, D, F)), normal(2, (M, F))
    sizes = harness.draw_sizes(M, G)
    s = jnp.asarray(sizes)
    out = _dense(x, normal(3, (D, F)))
    for name in _backends(M, D, G):
        jits = {
            "forward": jax.jit(lambda x, w, dy, s, b=name: product(x, w, s, b)),
            "data gradient": jax.jit(lambda x, w, dy, s, b=name: product(dy, w, s, b, transpose=True)),
            "weight gradient": jax.jit(lambda x, w, dy, s, b=name: product_dw(x, dy, s, b)),
        }
        for direction, function in jits.items():
            if direction == "forward" or not (forward_only or (name == "xla" and harness.on_gpu())):
                out[name, direction] = functools.partial(function, x, w, dy, s)
    if torch_baseline.available():
        for direction, call in torch_baseline.products(M, D, F, sizes).items():
            if direction == "forward" or not forward_only:
                out["torch", direction] = call
    return out


def measure(case: str, M: int, D: int, F: int, G: int, *, forward_only: bool = False) -> list[harness.Row]:
    """All backends and directions of one case, by turns."""
    functions = _functions(M, D, F, G, forward_only)
    times = harness.time_us({f"{b}|{d}": f for (b, d), f in functions.items()})
    flops = 2 * M * D * F
    ceiling = flops / min(us for name, us in times.items() if name.startswith("dense")) / 1e6
    rows = []
    for name, us in times.items():
        backend, direction = name.split("|")
        rows.append(harness.row("matmul", case, backend, direction, us=us, work=flops, unit="TFLOP/s", ceiling=ceiling))
    return rows
