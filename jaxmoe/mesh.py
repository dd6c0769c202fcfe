"""The expert-parallel axes of a mesh: build, check, size."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxmoe.compat import varying_axes
from jaxmoe.config import AxisNames

AnyMesh = Mesh | AbstractMesh


def axis_tuple(axis: AxisNames) -> tuple[str, ...]:
    """One name, a tuple of names or None, as a tuple."""
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def make_mesh(
    ep_size: int | None = None,
    *,
    data: int = 1,
    axis: str = "expert",
    axis_type: AxisType = AxisType.Auto,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Build a mesh of `data` × `ep_size` devices with the axes ("data", axis).

    Args:
      ep_size: R, the ranks that share the experts; None takes all devices / data.
      data: replicas of the expert group. With data=1 the mesh has the EP axis alone.
      axis: the name of the EP axis.
      axis_type: Auto (the compiler spreads shardings) or Explicit (they are part of the types).
      devices: the devices to use; None takes `jax.devices()`.

    Returns:
      A mesh; EP ranks are neighbours in the order of the devices.

    Raises:
      ValueError: the devices do not suffice.

    Example:
      >>> make_mesh(1).shape["expert"]
      1
    """
    devices = list(jax.devices() if devices is None else devices)
    ep_size = len(devices) // data if ep_size is None else ep_size
    if ep_size < 1 or data < 1 or data * ep_size > len(devices):
        raise ValueError(
            f"a mesh needs 1 <= data × ep_size <= devices; got data={data}, ep_size={ep_size} and {len(devices)} "
            "devices. On a CPU make virtual ones first: jax.config.update('jax_num_cpu_devices', 8)."
        )
    names, shape = (("data", axis), (data, ep_size)) if data > 1 else ((axis,), (ep_size,))
    grid = np.asarray(devices[: data * ep_size]).reshape(shape)
    return Mesh(grid, names, axis_types=(axis_type,) * len(names))


def current_mesh(mesh: AnyMesh | None) -> AnyMesh | None:
    """`mesh`, or the one of `jax.set_mesh`, or None."""
    if mesh is not None:
        return mesh
    ambient = jax.sharding.get_abstract_mesh()
    return None if ambient.empty else ambient


def check_axes(mesh: AnyMesh, axes: tuple[str, ...]) -> None:
    """Raise unless every EP axis is one of the mesh's."""
    missing = [a for a in axes if a not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis must name axes of the mesh; got {missing} on a mesh with axes {tuple(mesh.axis_names)}. "
            f"Pass axis={mesh.axis_names[-1]!r}, or build the mesh with jaxmoe.make_mesh(axis={missing[0]!r})."
        )
    if len(set(axes)) != len(axes):
        raise ValueError(f"axis must name each mesh axis once; got {axes}. Remove the repeated one.")


def mesh_size(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    """R: the ranks along `axes`."""
    return math.prod(mesh.shape[a] for a in axes)


def rank_and_size(axes: tuple[str, ...]) -> tuple[jax.Array | int, int]:
    """This rank's index along `axes` and their size, inside shard_map; (0, 1) without axes."""
    if not axes:
        return 0, 1
    return lax.axis_index(axes), lax.axis_size(axes)


def vary(tree: Any, axes: tuple[str, ...]) -> Any:
    """Mark every array of `tree` as differing along `axes`, so that its gradient is summed over them once, here."""

    def one(a):
        missing = tuple(x for x in axes if x not in varying_axes(a))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(one, tree)


def vary_like(out: Any, *inputs: Any) -> Any:
    """`out`, typed as differing along the mesh axes that `inputs` differ along: a kernel's result forgets them."""
    return vary(out, tuple(sorted(frozenset().union(*map(varying_axes, inputs)))))
