"""The options of the demo: from strings to checked values and a mesh, or one clear sentence about what is wrong."""

import argparse
import contextlib
import dataclasses
import os
import re
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

import jaxmoe
from jaxmoe.comm import TRANSPORTS
from jaxmoe.demo.data import load_text
from jaxmoe.layers.checks import check_experts
from jaxmoe.schedules import Schedule

# Enough for every rank of the default mesh to hold two experts.
_EXPERTS = 16
# Sequences of a batch, where the mesh divides it.
_BATCH = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a run of the demo is; made by `prepare`."""

    moe: jaxmoe.MoEConfig
    schedule: Schedule
    mesh: Mesh
    text: np.ndarray
    text_name: str
    steps: int
    seed: int
    batch: int
    seq: int
    out: Path
    json: Path | None
    quiet: bool

    @property
    def ep_size(self) -> int:
        """R, the ranks that share the experts."""
        return self.mesh.shape["expert"]

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes over which the sequences of a batch are spread: all."""
        return self.mesh.axis_names

    @property
    def data_size(self) -> int:
        """The replicas of the expert group."""
        return self.mesh.size // self.ep_size

    @property
    def schedule_name(self) -> str:
        """As `--schedule` takes it."""
        return f"chunks:{self.schedule.num_lanes}" if self.schedule.num_lanes > 1 else "sequential"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `jaxmoe demo`."""
    add = parser.add_argument
    default = " (default: %(default)s)"
    schedule = "sequential|chunks:N"
    add("--experts", type=_positive, metavar="E", help=f"experts of a layer (default: {_EXPERTS}, or 2 a rank)")
    add("--top-k", type=_positive, default=2, metavar="K", help="experts per token" + default)
    add("--mesh", type=_mesh_shape, metavar="[DATAx]R", help="R ranks share the experts: 8, 2x4 (default: all devices)")
    add("--devices", type=_positive, default=8, metavar="N", help="virtual CPU devices if there is no GPU" + default)
    add("--transport", choices=sorted(TRANSPORTS), default="all_gather", help="the collectives" + default)
    add("--schedule", type=_schedule, default="chunks:2", metavar=schedule, help="of the MoE layers" + default)
    add("--steps", type=_positive, default=100, metavar="N", help="optimiser steps" + default)
    add("--batch", type=_positive, metavar="B", help=f"sequences a step, over all ranks (default: {_BATCH} or more)")
    add("--seq", type=_positive, default=64, metavar="S", help="bytes a sequence" + default)
    add("--seed", type=int, default=0, metavar="N", help="of parameters and batches" + default)
    add("--text", type=Path, metavar="PATH", help="a file, or a folder of *.py (default: Python's standard library)")
    add("--out", type=Path, default=Path("jaxmoe-demo"), metavar="DIR", help="for the pictures" + default)
    add("--json", type=Path, metavar="FILE", help="write the results there too")
    add("--quiet", action="store_true", help="print the verdict alone")


def prepare(args: argparse.Namespace) -> Options:
    """Check the options against each other and the machine, and make the mesh.

    Raises:
      ValueError: options that do not fit; the message says the remedy.
      OSError: a text that cannot be read.
    """
    if not 0 <= args.seed < 2**32:
        raise ValueError(f"--seed must lie in [0, 2**32); got {args.seed}. Pass --seed 0")
    mesh = _make_mesh(args.mesh, args.devices)
    R = mesh.shape["expert"]
    experts = args.experts or (_EXPERTS if _EXPERTS % R == 0 else 2 * R)
    router = jaxmoe.RouterConfig(num_experts=experts, top_k=args.top_k, score="sigmoid")
    moe = jaxmoe.MoEConfig(router=router, token_spec=jax.P(mesh.axis_names), transport=args.transport)
    check_experts(moe, mesh, ("expert",))
    batch = args.batch or -(-_BATCH // mesh.size) * mesh.size
    if batch % mesh.size:
        raise ValueError(
            f"--batch must be a multiple of the {mesh.size} devices of the mesh; got {batch}. "
            f"Pass --batch {-(-batch // mesh.size) * mesh.size}"
        )
    text, text_name = load_text(args.text, min_bytes=args.seq + 1)
    for option, folder in (("--out", args.out), ("--json", args.json and args.json.parent)):
        if folder is not None:
            _make_folder(option, folder)
    if args.json and args.json.is_dir():
        raise ValueError(f"--json must be a file; {args.json} is a folder. Pass --json {args.json / 'results.json'}")
    return Options(
        moe=moe,
        schedule=args.schedule,
        mesh=mesh,
        text=text,
        text_name=text_name,
        steps=args.steps,
        seed=args.seed,
        batch=batch,
        seq=args.seq,
        out=args.out,
        json=args.json,
        quiet=args.quiet,
    )


def _make_mesh(shape: tuple[int, int] | None, cpu_devices: int) -> Mesh:
    """A mesh of (data, expert) ranks over the GPUs, or over virtual CPU devices; None puts all on "expert"."""
    # Where a backend runs already, in a test or a notebook, its devices are the ones there are.
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    devices = jax.devices()
    data, ranks = shape or (1, len(devices))
    if data * ranks > len(devices):
        more = f"--devices {data * ranks} for that many virtual ones, or " if devices[0].platform == "cpu" else ""
        raise ValueError(
            f"--mesh needs at most as many ranks as there are devices; got {data}x{ranks} on {len(devices)} "
            f"{devices[0].platform} devices. Pass {more}--mesh {len(devices)}"
        )
    return jaxmoe.make_mesh(ranks, data=data)


def _make_folder(option: str, folder: Path) -> None:
    """Now rather than after a minute of training."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{option} needs a folder; cannot make {folder}: {error.strerror}. Pass another one"
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(f"{option} needs a folder that can be written; {folder} cannot. Pass another one")


def _positive(text: str) -> int:
    if not re.fullmatch(r"\+?0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text!r}")
    return int(text)


def _mesh_shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:([1-9][0-9]*)x)?([1-9][0-9]*)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"must be R or DATAxR, such as 8 or 2x4; got {text!r}")
    return int(found[1] or 1), int(found[2])


def _schedule(text: str) -> Schedule:
    found = re.fullmatch(r"chunks:([1-9][0-9]*)", text)
    if text == "sequential":
        return jaxmoe.Sequential()
    if not found:
        raise argparse.ArgumentTypeError(f"must be sequential or chunks:N, such as chunks:4; got {text!r}")
    return jaxmoe.TokenChunks(int(found[1]))
