"""`jaxmoe bench transport`: time each transport's dispatch and combine, with bytes on the wire and achieved GB/s.

Timed are the transport's own parts, `send` and `collect`: its collectives, and the copies that it makes for them. The
gather of the routing, the row maps and the permutation into expert order, which all transports share, are not.
Blocks of `all_to_all` and `ragged` hold the largest one of the routing drawn, so nothing is dropped.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.bench.harness import write_rows
from jaxmoe.comm import RoutingTable, available_transports, gather_routing, ragged, transport_of
from jaxmoe.mesh import make_mesh
from jaxmoe.perf import SHAPES, TINY, Hardware, Shape, Wire, Workload, block_counts, find_hardware, traffic
from jaxmoe.routing import Routing

AXIS = "expert"
DTYPES = ("bfloat16", "float16", "float32")
_SHAPES: dict[str, Shape] = {**SHAPES, TINY.name: TINY}
VIRTUAL = (
    "The mesh is virtual: these times are of one machine's memory and mean nothing. The bytes are those that GPUs send."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the result file.

    Attributes:
      bench: "transport".
      case: shape, tokens per rank, ranks, dtype, and the block's rows.
      backend: the transport.
      direction: "dispatch" or "combine".
      us: median, microseconds.
      rate: bytes on the wire per rank over time.
      unit: "GB/s".
      ceiling: the described link, GB/s; None where the mesh is virtual.
      fraction: rate / ceiling, or None.
      device: kind and number.
      jax: its version.
      date: ISO 8601.
      bytes: on the wire, per rank.
      vs_naive: naive's time over this one.
      virtual: whether the times mean nothing.
    """

    bench: str
    case: str
    backend: str
    direction: str
    us: float
    rate: float
    unit: str
    ceiling: float | None
    fraction: float | None
    device: str
    jax: str
    date: str
    bytes: int
    vs_naive: float | None
    virtual: bool


@dataclasses.dataclass(frozen=True)
class Case:
    """What is timed: the mesh, a routing drawn evenly, and the call that it makes."""

    mesh: Mesh
    load: Workload
    expert_ids: np.ndarray
    counts: np.ndarray
    label: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jaxmoe bench transport`."""
    add = parser.add_argument
    add("--shape", choices=sorted(_SHAPES), help="a model's layer (default: deepseek-v3; tiny on virtual devices)")
    add("--tokens", type=int, metavar="T", help="tokens a rank (default: 4096; 64 on virtual devices)")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of the rows (default: %(default)s)")
    add("--ranks", type=int, metavar="R", help="ranks that share the experts (default: all devices)")
    add("--devices", type=int, default=4, metavar="N", help="virtual CPU devices if no GPU (default: %(default)s)")
    add("--repeats", type=int, default=10, metavar="N", help="timings, of which the median (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows; rows of other runs stay")


def run(args: argparse.Namespace) -> int:
    """Time, print and write; returns 0, or 2 where it cannot start as asked."""
    try:
        return _run(args)
    except (ValueError, OSError) as error:
        print(f"jaxmoe bench transport: error: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    """`run`; errors say the remedy."""
    if importlib.util.find_spec("rich") is None:
        raise ValueError("the table needs rich. Install it: pip install 'jaxmoe[viz]'")
    for option in ("tokens", "ranks", "devices", "repeats"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option} must be a positive integer; got {value}. Pass --{option} 1 or more")
    with contextlib.suppress(RuntimeError):  # a backend that runs already keeps its devices
        jax.config.update("jax_num_cpu_devices", args.devices)
    hardware = find_hardware()
    case = make_case(args, virtual=hardware.virtual)
    rows = time_transports(case, hardware, args.repeats)
    if jax.process_index() == 0:
        _print(rows, case, hardware)
        if args.json:
            write_rows(args.json, rows)
    return 0


def make_case(args: argparse.Namespace, *, virtual: bool) -> Case:
    """The mesh and the routing of the options; small ones where devices are virtual.

    Raises:
      ValueError: fewer than two ranks, more than there are devices, or ranks that do not divide the experts.
    """
    shape = _SHAPES[args.shape or ("tiny" if virtual else "deepseek-v3")]
    T, R = args.tokens or (64 if virtual else 4096), args.ranks or len(jax.devices())
    if R < 2:
        raise ValueError(
            f"a transport needs two ranks or more; got {R} on {len(jax.devices())} {jax.devices()[0].platform} "
            "devices. Run it on a machine with several GPUs, or on virtual devices: JAX_PLATFORMS=cpu, --devices 4"
        )
    mesh = make_mesh(R, axis=AXIS)
    E, K = shape.num_experts, shape.top_k
    load = Workload(tokens=T, d_model=shape.d_model, num_experts=E, top_k=K, ranks=R, dtype=args.dtype)
    ids = np.argsort(np.random.default_rng(0).random((R, T, E)), axis=-1)[..., :K].astype(np.int32)
    counts = block_counts(ids, E)
    load = dataclasses.replace(load, wire_rows=max(1, int(counts.max())))
    return Case(mesh, load, ids, counts, f"{shape.name} T={T} D={shape.d_model} E={E} K={K} R={R} {args.dtype}")


def time_transports(case: Case, hardware: Hardware, repeats: int) -> list[Row]:
    """A row for each transport that runs here, and direction; the fastest of a direction first."""
    load = case.load
    names = available_transports(load.ranks, load.num_experts)
    if not hardware.virtual:
        names = [n for n in names if n != "ragged_emulated"]  # a stand-in for tests: its speed is nobody's
    times = {name: _time_one(case, name, repeats) for name in names}
    device = f"{load.ranks} x {jax.devices()[0].device_kind}" + (" (virtual)" if hardware.virtual else "")
    # Between nodes the slower link is what bounds an exchange.
    link = hardware.link_gbs if load.ranks <= hardware.ranks_per_node else hardware.network_gbs
    ceiling = None if hardware.virtual else link
    now = datetime.date.today().isoformat()
    rows = []
    for direction in ("dispatch", "combine"):
        for name in sorted(names, key=lambda n: times[n][direction]):
            us = times[name][direction]
            sent: Wire = getattr(traffic(name, load, case.counts), direction)
            rate = sent.bytes / us / 1e3
            rows.append(
                Row(
                    bench="transport",
                    case=case.label + (f" W={load.wire_rows}" if _has_blocks(name) else ""),
                    backend=name,
                    direction=direction,
                    us=us,
                    rate=rate,
                    unit="GB/s",
                    ceiling=ceiling,
                    fraction=None if ceiling is None else rate / ceiling,
                    device=device,
                    jax=jax.__version__,
                    date=now,
                    bytes=sent.bytes,
                    vs_naive=times["naive"][direction] / us if "naive" in times else None,
                    virtual=hardware.virtual,
                )
            )
    return rows


def _has_blocks(transport: str) -> bool:
    return transport not in ("naive", "all_gather")


def _time_one(case: Case, name: str, repeats: int) -> dict[str, float]:
    """Microseconds of a transport's send and collect."""
    transport, load, mesh = transport_of(name), case.load, case.mesh
    wire_rows = load.wire_rows if _has_blocks(name) else None
    over = P(AXIS)

    def on_ranks(fn: Callable) -> Callable:
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=over, out_specs=over))

    def arrange(ids, weights):
        table: RoutingTable = gather_routing(Routing(ids, weights), (AXIS,))
        return transport.arrange(table, load.num_experts, (AXIS,), wire_rows)

    rng = np.random.default_rng(1)
    put = lambda a, dtype: jax.device_put(jnp.asarray(a, dtype), NamedSharding(mesh, over))  # noqa: E731
    N = load.ranks * load.tokens
    ids = put(case.expert_ids.reshape(N, load.top_k), jnp.int32)
    x = put(rng.standard_normal((N, load.d_model), np.float32), load.dtype)
    handle = on_ranks(arrange)(ids, put(np.full(ids.shape, 1 / load.top_k), jnp.float32))
    send = on_ranks(lambda args: transport.send(*args))
    collect = on_ranks(lambda args: transport.collect(*args))
    arrived = send((x, handle))  # random rows of the right shape for the way back, too
    return {
        "dispatch": _median_us(lambda: send((x, handle)), repeats),
        "combine": _median_us(lambda: collect((arrived, handle)), repeats),
    }


def _median_us(call: Callable, repeats: int) -> float:
    """Of `repeats` timings, each of enough calls for about 10 ms, after two warm ones."""
    jax.block_until_ready(call())
    began = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, min(50, int(0.01 / (time.perf_counter() - began))))
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)])
        taken.append((time.perf_counter() - began) / calls * 1e6)
    return statistics.median(taken)


def _print(rows: list[Row], case: Case, hardware: Hardware) -> None:
    from rich.console import Console  # an extra
    from rich.table import Table

    console = Console(highlight=False)
    head = f"{case.label}, blocks of W={case.load.wire_rows} rows, on {rows[0].device}, jax {rows[0].jax}"
    console.print(head, soft_wrap=True)
    table = Table()
    for title in ("direction", "transport", "MB a rank", "us", "GB/s", "of link", "vs naive"):
        table.add_column(title, justify="left" if title in ("direction", "transport") else "right", no_wrap=True)
    for i, row in enumerate(rows):
        table.add_row(
            row.direction,
            row.backend,
            f"{row.bytes / 1e6:.3f}",
            f"{row.us:.1f}",
            f"{row.rate:.3g}",
            "-" if row.fraction is None else f"{row.fraction:.0%}",
            "-" if row.vs_naive is None else f"{row.vs_naive:.2f}x",
            end_section=i + 1 < len(rows) and rows[i + 1].direction != row.direction,
        )
    console.print(table)
    try:
        ragged.preflight(case.load.ranks, case.load.num_experts)
    except NotImplementedError as refusal:
        console.print(f"Left out, ragged: {refusal}", soft_wrap=True)
    if hardware.virtual:
        console.print(VIRTUAL, soft_wrap=True)
