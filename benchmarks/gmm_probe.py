"""Checks and times the grouped matmul on one GPU, alone: `python3 benchmarks/gmm_probe.py check tune final weight`.

Every check runs on poisoned memory: outputs start as NaN and the rows past the last group are NaN. Every time is
taken on random data, with group sizes from a multinomial over a Dirichlet(4) draw, beside a dense product of the same
size and PyTorch's grouped product in the same process. Rows go to $OUT/gmm.json.
"""

import concurrent.futures
import datetime
import functools
import json
import os
import statistics
import sys
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_matmul import Config, grouped_matmul, grouped_matmul_dw, grouped_swiglu

BF16 = jnp.bfloat16
SHAPES = {  # name: M, D, F, G
    "qwen3-30b up": (65536, 2048, 1536, 128),
    "qwen3-30b down": (65536, 768, 2048, 128),
    "dsv3 ep8 up": (32768, 7168, 4096, 32),
    "dsv3 ep8 down": (32768, 2048, 7168, 32),
    "mixtral up": (8192, 4096, 28672, 8),
    "mixtral down": (8192, 14336, 4096, 8),
    "gpt-oss up": (16384, 2880, 5760, 32),
    "qwen3-30b decode": (1024, 2048, 1536, 128),
}
ROWS: list[dict] = []
STARTED = time.time()


def say(*words):
    print(f"[{time.time() - STARTED:5.0f}s]", *words, flush=True)


def draw_sizes(M, G, seed=0):
    rng = np.random.default_rng(seed)
    return rng.multinomial(M, rng.dirichlet(np.full(G, 4.0))).astype(np.int32)


def compile_all(jobs):
    """{name: (function, argument specs)} -> {name: executable or the error as text}."""

    def one(job):
        function, args = job
        try:
            return jax.jit(function).lower(*args).compile()
        except Exception as error:  # one bad configuration must not end the run; it is printed and counted
            return f"{type(error).__name__}: {str(error)[-300:]}"

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        return dict(zip(jobs, pool.map(one, jobs.values()), strict=True))


def time_us(functions, rounds=7, budget_s=0.03):
    """{name: function} -> {name: µs}. The functions take turns, a burst of calls each, and each gets the median of its
    bursts: the chip's clock follows its power and its temperature, so only neighbours in time can be compared."""
    counts = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        began = time.perf_counter()
        jax.block_until_ready([function() for _ in range(3)])
        counts[name] = max(3, min(100, int(budget_s / ((time.perf_counter() - began) / 3))))
    taken = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            for _ in range(counts[name]):
                out = function()
            jax.block_until_ready(out)
            taken[name].append((time.perf_counter() - began) / counts[name] * 1e6)
            del out
    return {name: statistics.median(times) for name, times in taken.items()}


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@functools.partial(jax.jit, static_argnums=(1,))
def normal(key, shape):
    return jax.random.normal(key, shape, BF16)


def poison(*shapes):
    """Leaves NaN behind in freed memory, where the next outputs of these shapes will lie."""
    for shape, dtype in shapes:
        jax.block_until_ready(jnp.full(shape, jnp.nan, dtype))


# ---------------------------------------------------------------- correctness


def group_patterns(M, G):
    rng = np.random.default_rng(1)
    edges = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 191, 192, 193, 0, 255, 257]
    yield "edges", (edges * G)[:G]
    yield "draw", draw_sizes(max(0, M - 37), G)
    yield "tiny", rng.integers(0, 16, G)
    yield "one", [0] * (G - 2) + [M - 3, 0]
    yield "first", [M] + [0] * (G - 1)
    yield "none", [0] * G
    yield "holes", [int(s) if g % 2 else 0 for g, s in enumerate(draw_sizes(M, G, 2))]
    yield "eights", [8 * int(s) for s in rng.integers(0, M // (8 * G) + 1, G)]


def relative(out, ref):
    norm = np.linalg.norm(ref)
    return float(np.linalg.norm(out - ref) / norm) if norm else float(np.abs(out).max(initial=0))


VARIANTS = {
    "128x256 cols": Config(),
    "128x256 split cols": Config(split="cols"),
    "256x128 cols": Config(rows=256, cols=128),
    "128x256 rows": Config(cluster="rows"),
    "64x256 none": Config(rows=64, split="cols", cluster=None),
    "256x192 cols": Config(rows=256, cols=192, stages=3),
    "128x256/c rows": Config(cluster="rows", split="cols"),
}


def check_cases():
    """{name: (kind, M, D, F, G, configuration)}."""
    usual = 2048, 576, 832, 16
    cases = {f"fwd {name}": ("fwd", *usual, config) for name, config in VARIANTS.items()}
    for kind, names in {
        "bwd": ("128x256 cols", "64x256 none", "256x192 cols", "128x256 rows"),
        "swiglu": ("128x256 cols", "128x256 rows", "256x128 cols"),
        "dw": ("128x256 rows",),
    }.items():
        cases |= {f"{kind} {name}": (kind, *usual, VARIANTS[name]) for name in names}
    cases["dw 256x128 rows"] = ("dw", *usual, Config(rows=256, cols=128, cluster="rows"))
    cases["dw f32"] = ("dw32", *usual, None)
    cases["fwd M < tile"] = ("fwd", 17, 128, 192, 4, Config())
    for kind in ("fwd", "bwd", "dw"):
        cases[f"{kind} 2880"] = (kind, 777, 2880, 2880, 5, None)
        cases[f"{kind} tiny M"] = (kind, 17, 128, 192, 4, None)
        cases[f"{kind} G=512"] = (kind, 3001, 128, 256, 512, None)
        cases[f"{kind} few SMs"] = (kind, 1000, 256, 256, 7, None)
    return cases


def second_shape(kind, M, D, F, G):
    return {"fwd": (G, D, F), "bwd": (G, F, D), "swiglu": (G, D, 2 * F), "dw": (M, F), "dw32": (M, F)}[kind]


def reference(kind, x, y, sizes):
    """What the kernel should give, with numpy, group by group; a list."""
    begin = np.cumsum(sizes) - sizes
    spans = [slice(b, b + s) for b, s in zip(begin, sizes, strict=True)]
    if kind.startswith("dw"):
        return [np.stack([x[rows].T @ y[rows] for rows in spans])]
    product = np.concatenate([x[rows] @ (w.T if kind == "bwd" else w) for rows, w in zip(spans, y, strict=True)])
    if kind != "swiglu":
        return [product]
    gate, up = np.split(product, 2, axis=1)
    return [gate / (1 + np.exp(np.minimum(-gate, 80))) * up, product]


def check_one(run, kind, M, D, F, G):
    """Every pattern of group sizes on one compiled kernel: the worst error and what failed."""
    key = jax.random.split(jax.random.key(3), 2)
    x, y = normal(key[0], (M, D)), normal(key[1], second_shape(kind, M, D, F, G))
    x32, y32 = np.asarray(x, np.float32), np.asarray(y, np.float32)
    is_dw = kind.startswith("dw")
    outputs = [((G, D, F), jnp.float32 if kind == "dw32" else BF16)] if is_dw else [((M, F), BF16), ((M, 2 * F), BF16)]
    worst, notes = 0.0, []
    for pattern, sizes in group_patterns(M, G):
        sizes = np.asarray(sizes, np.int32)
        while sizes.sum() > M:
            sizes[np.argmax(sizes)] -= min(sizes.max(), sizes.sum() - M)
        n = int(sizes.sum())
        second = y.at[n:].set(jnp.nan) if is_dw else y
        poison(*outputs)
        out = jax.block_until_ready(run(x.at[n:].set(jnp.nan), second, jnp.asarray(sizes)))
        out = [np.asarray(o, np.float32) for o in (out if isinstance(out, (tuple, list)) else [out])]
        if is_dw and any(np.any(out[0][g]) for g in range(G) if sizes[g] == 0):
            notes.append(f"{pattern}: empty group not zero")
        ref = reference(kind, x32, y32, sizes)
        error = max(relative(o if is_dw else o[:n], r) for o, r in zip(out, ref, strict=True))
        if not error < 5e-3:
            notes.append(f"{pattern}: {error:.2e}")
        worst = max(worst, error) if error == error else error
    return worst, notes


def check():
    cases, jobs = check_cases(), {}
    for name, (kind, M, D, F, G, config) in cases.items():
        options = dict(config=config, num_sms=6 if "few" in name else None)
        f = {
            "fwd": functools.partial(grouped_matmul, **options),
            "bwd": functools.partial(grouped_matmul, transpose_rhs=True, **options),
            "swiglu": functools.partial(grouped_swiglu, save_preactivation=True, **options),
            "dw": functools.partial(grouped_matmul_dw, **options),
            "dw32": functools.partial(grouped_matmul_dw, out_dtype=jnp.float32, **options),
        }[kind]
        jobs[name] = (f, (spec(M, D), spec(*second_shape(kind, M, D, F, G)), spec(G, dtype=jnp.int32)))
    say(f"compiling {len(jobs)} checks")
    built = compile_all(jobs)
    say("compiled")
    bad = 0
    for name, (kind, M, D, F, G, _) in cases.items():
        if isinstance(built[name], str):
            worst, notes = float("nan"), ["does not compile:", built[name]]
        else:
            worst, notes = check_one(built[name], kind, M, D, F, G)
        bad += bool(notes)
        say("ok  " if not notes else "BAD ", f"{name:28s} {worst:.1e}", *notes[:4])
    say("checks failed:", bad)
    return bad


# ---------------------------------------------------------------- speed


def record(case, backend, direction, us, work, unit, ceiling):
    rate = work / us / 1e6
    ROWS.append(
        dict(
            bench="grouped_matmul",
            case=case,
            backend=backend,
            direction=direction,
            us=round(us, 1),
            rate=round(rate, 2),
            unit=unit,
            ceiling=round(ceiling, 2),
            fraction=round(rate / ceiling, 4),
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            date=datetime.date.today().isoformat(),
        )
    )
    return rate


def dense(M, D, F):
    """One M×D×F product by cuBLAS and by JAX's sample kernel: {name: function}."""
    x, w = normal(jax.random.key(0), (M, D)), normal(jax.random.key(1), (D, F))
    functions = {"cublas": functools.partial(jax.jit(jnp.dot), x, w)}
    try:
        if "nosample" in sys.argv:
            return functions
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as sample
    except ImportError as error:
        say("no sample matmul:", error)
        return functions
    dim = sample.MatmulDimension
    tiles = {
        "sample 64x256": dict(tile_m=64, tile_n=256, wg_dimension=dim.M, cluster_dimension=dim.N),
        "sample 128x128": dict(tile_m=128, tile_n=128, wg_dimension=dim.N, cluster_dimension=dim.M),
    }
    configs = {
        name: sample.TuningConfig(tile_k=64, max_concurrent_steps=4, grid_minor_dim=dim.M, grid_tile_width=8, **kw)
        for name, kw in tiles.items()
    }
    built = compile_all({n: (functools.partial(sample.matmul, c=None, config=c), (x, w)) for n, c in configs.items()})
    for name, run in built.items():
        if isinstance(run, str):
            say(name, run[-120:])
        else:
            functions[name] = functools.partial(run, x, w)
    return functions


class TorchCall:
    """PyTorch's grouped product as something that time_us can call and wait for."""

    def __init__(self, M, D, F, sizes, dw):
        import torch

        self.torch = torch
        self.offsets = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device="cuda")
        self.x = torch.randn(M, D, device="cuda", dtype=torch.bfloat16)
        second = (M, F) if dw else (len(sizes), D, F)
        self.w = torch.randn(*second, device="cuda", dtype=torch.bfloat16)
        self.x = self.x.t() if dw else self.x

    def __call__(self):
        self.out = self.torch._grouped_mm(self.x, self.w, offs=self.offsets)
        return self

    def block_until_ready(self):
        self.torch.cuda.synchronize()
        return self


def directions(M, D, F, G):
    """Functions of (x [M,D], w [G,D,F], dy [M,F], sizes) by name, for a configuration and a number of SMs."""

    def pick(plan):
        config, sms = plan if isinstance(plan, tuple) else (plan, None)
        return dict(config=config, num_sms=sms)

    return {
        "forward": lambda p: lambda x, w, dy, s: grouped_matmul(x, w, s, **pick(p)),
        "data gradient": lambda p: lambda x, w, dy, s: grouped_matmul(dy, w, s, transpose_rhs=True, **pick(p)),
        "weight gradient": lambda p: lambda x, w, dy, s: grouped_matmul_dw(x, dy, s, **pick(p)),
        "swiglu": lambda p: lambda x, w, dy, s: grouped_swiglu(x, w, s, **pick(p)),
        "swiglu + p": lambda p: lambda x, w, dy, s: grouped_swiglu(x, w, s, save_preactivation=True, **pick(p)),
    }


def measure(case, plans):
    """plans: {direction: {name: configuration or None for the default}}. Everything of a case takes turns."""
    M, D, F, G = SHAPES[case]
    sizes = draw_sizes(M, G)
    table = directions(M, D, F, G)
    args = (spec(M, D), spec(G, D, F), spec(M, F), spec(G, dtype=jnp.int32))
    built = compile_all({(d, n): (table[d](c), args) for d, configs in plans.items() for n, c in configs.items()})
    key = jax.random.split(jax.random.key(5), 3)
    data = (*(normal(k, a.shape) for k, a in zip(key, args[:3], strict=True)), jnp.asarray(sizes))
    functions = {("dense", name): function for name, function in dense(M, D, F).items()}
    for direction, dw in (("forward", False), ("weight gradient", True)):
        if direction in plans:
            try:
                functions[direction, "torch"] = TorchCall(M, D, F, sizes, dw)
                functions[direction, "torch"]()
            except Exception as error:  # a baseline that cannot run is printed, not hidden
                functions.pop((direction, "torch"), None)
                say("torch:", type(error).__name__, str(error)[:200])
    for (direction, name), run in built.items():
        if isinstance(run, str):
            say("COMPILE", case, direction, name, run)
        else:
            functions[direction, f"pallas {name}".strip()] = functools.partial(run, *data)
    times = time_us(functions)
    flops = 2 * M * D * F
    ceiling = flops / min(us for (direction, _), us in times.items() if direction == "dense") / 1e6
    for (direction, name), us in times.items():
        rate = record(case, name, direction, us, flops, "TFLOP/s", ceiling)
        say(f"{case:17s} {direction:15s} {name:24s} {us:8.1f}us {rate:6.1f} {rate / ceiling:.3f}")


FORWARD = {
    "128x256 C 4": Config(),
    "128x256 R 4": Config(cluster="rows"),
    "128x256 R 3": Config(cluster="rows", stages=3),
    "128x256/c R 4": Config(cluster="rows", split="cols"),
    "256x192 C 3": Config(rows=256, cols=192, stages=3),
}


def tune():
    two = {n: FORWARD[n] for n in ("128x256 C 4", "128x256 R 4")}
    weight = {f"128x256 R {n}": Config(stages=n, cluster="rows") for n in (3, 4)}
    small = {f"64x256 {c}": Config(rows=64, split="cols", cluster=c) for c in ("cols", None)}
    for case in SHAPES:
        plans = {"forward": FORWARD, "data gradient": two, "weight gradient": weight}
        if "up" in case:
            plans |= {"swiglu": two, "swiglu + p": two}
        measure(case, {"forward": small} if "decode" in case else plans)


def weight():
    """The weight gradient alone, at the shapes that have a goal."""
    for case in ("dsv3 ep8 up", "dsv3 ep8 down", "qwen3-30b up"):
        measure(case, {"weight gradient": {"": None}})


def final():
    everything = {d: {"": None} for d in directions(*SHAPES["qwen3-30b up"])}
    for case in SHAPES:
        if "decode" in case:
            keep = ["forward"]
        elif "up" in case:
            keep = list(everything)
        else:
            keep = ["forward", "data gradient", "weight gradient"]
        measure(case, {d: everything[d] for d in keep})


if __name__ == "__main__":
    say(jax.devices()[0], jax.__version__)
    failed = 0
    try:
        for stage in sys.argv[1:]:
            failed += {"check": check, "tune": tune, "final": final, "weight": weight}.get(stage, lambda: 0)() or 0
    finally:
        if "OUT" in os.environ:
            with open(os.path.join(os.environ["OUT"], "gmm.json"), "w") as file:
                json.dump(ROWS, file, indent=1)
    sys.exit(bool(failed))
