"""What the benchmarks share: timing by turns, rows of results, the table, the plot, the file."""

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One measured figure; the fields of `benchmarks/results/*.json`.

    Attributes:
      us: microseconds, the median.
      rate: work per second in `unit`; ceiling: the most that the same run reached, in the same unit; fraction of it.
    """

    bench: str
    case: str
    backend: str
    direction: str
    us: float
    rate: float
    unit: str
    ceiling: float
    fraction: float
    device: str
    jax: str
    date: str


def row(
    bench: str, case: str, backend: str, direction: str, *, us: float, work: float, unit: str, ceiling: float
) -> Row:
    """A Row from a time and the work done in it (operations or bytes; `unit` starts with T or G)."""
    rate = work / us * 1e6 / {"T": 1e12, "G": 1e9}[unit[0]]
    return Row(
        bench=bench,
        case=case,
        backend=backend,
        direction=direction,
        us=round(us, 2),
        rate=round(rate, 3),
        unit=unit,
        ceiling=round(ceiling, 3),
        fraction=round(rate / ceiling, 4),
        device=jax.devices()[0].device_kind,
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
    )


def share_row(bench: str, case: str, backend: str, direction: str, *, us: float, whole_us: float) -> Row:
    """A Row for a part of something: its rate and fraction are its share of the whole's time."""
    whole = row(bench, case, backend, direction, us=us, work=1.0, unit="TFLOP/s", ceiling=1.0)
    share = round(us / whole_us, 4)
    return dataclasses.replace(whole, rate=share, unit="of the whole", ceiling=1.0, fraction=share)


def time_us(functions: Mapping[str, Callable[[], Any]], *, rounds: int = 7, budget_s: float = 0.03) -> dict[str, float]:
    """The median microseconds of each function, in bursts by turns: the clock drifts, so neighbours are compared.

    A function returns something to wait for: arrays of JAX, or an object with `block_until_ready`.
    """
    counts = {}
    for name, function in functions.items():
        jax.block_until_ready(function())
        start = time.perf_counter()
        jax.block_until_ready([function() for _ in range(3)])
        counts[name] = max(3, min(100, int(budget_s / ((time.perf_counter() - start) / 3))))
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                out = function()
            jax.block_until_ready(out)
            taken[name].append((time.perf_counter() - start) / counts[name] * 1e6)
            del out
    return {name: statistics.median(times) for name, times in taken.items()}


def copy_rate_gbs(size_bytes: int = 1 << 31) -> float:
    """GB/s of a device copy, bytes read plus bytes written: the ceiling of what is bound by memory."""
    x = jax.block_until_ready(jax.random.normal(jax.random.key(0), (size_bytes // 4,)))
    copy = jax.jit(lambda x: x + 1.0)
    return 2 * size_bytes / time_us({"copy": lambda: copy(x)})["copy"] / 1e3


def draw_sizes(num_rows: int, num_groups: int, seed: int = 0) -> np.ndarray:
    """[G] int32 summing to num_rows: a multinomial over a Dirichlet(4) draw, as a router that is trained gives."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_rows, rng.dirichlet(np.full(num_groups, 4.0))).astype(np.int32)


def on_gpu() -> bool:
    """Whether the default device is a GPU; without one the figures mean nothing and sizes are small."""
    return jax.default_backend() == "gpu"


def add_case_argument(parser: argparse.ArgumentParser, gpu_cases: Mapping[str, Any]) -> None:
    """--case, among the cases of a GPU; without one a small case runs in their place."""
    text = "only these, on a GPU; may be repeated"
    parser.add_argument("--case", action="append", choices=list(gpu_cases), metavar="NAME", help=text)


def chosen_cases(args: argparse.Namespace, gpu_cases: dict[str, Any], cpu_cases: dict[str, Any]) -> dict[str, Any]:
    """The cases to run. Asking for the device starts the backend, so this is for `run`, not for `add_arguments`."""
    if not on_gpu():
        return cpu_cases
    return {name: gpu_cases[name] for name in args.case or gpu_cases}


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """--json and --plot, the same for every benchmark."""
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the rows; rows of other runs stay")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png", help="draw fractions of the ceiling")


def report(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Print the table, and write and draw what was asked for."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{rows[0].device}, jax {rows[0].jax}, {rows[0].date}" if rows else "nothing was measured")
    for name in ("case", "direction", "backend", "µs", "rate", "of the ceiling"):
        table.add_column(name, justify="left" if name in ("case", "direction", "backend") else "right")
    for r in rows:
        rate, part = f"{r.rate:.1f} {r.unit}", f"{100 * r.fraction:.1f} %"
        table.add_row(r.case, r.direction, r.backend, f"{r.us:.1f}", rate, part)
    Console().print(table)
    if not on_gpu():
        print("No GPU: small shapes on a CPU. These figures show that it runs; they say nothing about speed.")
    if args.json:
        write_rows(args.json, rows)
        print(f"rows: {args.json}")
    if getattr(args, "plot", None):
        draw(args.plot, rows)
        print(f"plot: {args.plot}")


def write_rows(path: pathlib.Path, rows: Sequence[Any]) -> None:
    """Write rows to a JSON list; rows there of the same benchmark, case, backend, direction and device are replaced."""
    key = lambda r: (r["bench"], r["case"], r["backend"], r["direction"], r["device"])  # noqa: E731
    old = json.loads(path.read_text()) if path.exists() else []
    merged = {key(r): r for r in [*old, *(dataclasses.asdict(r) for r in rows)]}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(r) for r in merged.values())
    path.write_text(f"[\n{lines}\n]\n")


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """One panel a direction, one group of bars a case: each backend's fraction of the ceiling; parts are left out."""
    from matplotlib.figure import Figure

    rows = [r for r in rows if r.unit != "of the whole"]
    directions, cases = list(dict.fromkeys(r.direction for r in rows)), list(dict.fromkeys(r.case for r in rows))
    backends = list(dict.fromkeys(r.backend for r in rows))
    figure = Figure(figsize=(max(7, 1.5 * len(cases)), 3 * len(directions)), layout="constrained")
    axes = figure.subplots(len(directions), 1, squeeze=False)[:, 0]
    for axis, direction in zip(axes, directions, strict=True):
        for i, backend in enumerate(backends):
            at = [
                (c, r.fraction)
                for c, case in enumerate(cases)
                for r in rows
                if (r.case, r.direction, r.backend) == (case, direction, backend)
            ]
            if at:
                x, y = zip(*at, strict=True)
                place = np.array(x) + (i + 0.5) / len(backends) * 0.8 - 0.4
                axis.bar(place, y, 0.8 / len(backends), color=f"C{i}", label=backend)
        axis.axhline(1.0, color="0.5", linewidth=0.8)
        axis.set_xticks(range(len(cases)), cases, fontsize=8)
        axis.set_xlim(-0.5, len(cases) - 0.5)
        axis.set_ylabel("fraction of the ceiling")
        axis.set_title(direction, loc="left")
    handles = {label: bar for axis in axes for bar, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", frameon=False, ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
