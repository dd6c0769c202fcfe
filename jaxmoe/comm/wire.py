"""The quantised wire: rows cross in float8_e4m3fn, each with its own float32 scales, in one collective.

    scale[t, b] = max(max_c |x[t, c]| / 448, 2^-100)                    c over the 128 columns of block b
    q[t, c]     = e4m3(x[t, c] / scale[t, b])
    packed[t]   = the D bytes of q[t], then the 4·⌈D/128⌉ bytes of scale[t]       uint8 [T, D + 4·⌈D/128⌉]
    received    = float(q) · scale, right after arrival, in the dtype of x

A row takes D + 4·⌈D/128⌉ bytes: 0.516 of bfloat16 at D = 7168. Rows have scales of their own, so padding rows touch
nothing. A block of zeros gives zeros; a block with a NaN or an infinity arrives as NaN throughout, and no other block
does. Where nothing travels (an EP group of one rank), nothing is quantised.

The gradient is the straight-through one, in both directions: the transport's exact transpose in the plain dtype, as if
there were no rounding, since the derivative of the rounding is zero almost everywhere. Cotangents are not quantised.
"""

from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

from jaxmoe.comm.handle import Handle
from jaxmoe.compat import varying_axes
from jaxmoe.config import WireDtype, check_wire_dtype
from jaxmoe.mesh import rank_and_size, vary

BLOCK = 128
LARGEST = 448.0  # of e4m3; its smallest step is 2^-9
# Far enough above 2^-126 that 2^-9 · scale is no subnormal, which XLA flushes to zero.
SMALLEST_SCALE = 2.0**-100


def row_bytes(width: int) -> int:
    """The bytes of one quantised row of `width` columns on the wire: D + 4·⌈D/128⌉.

    Example:
      >>> row_bytes(7168), row_bytes(200)
      (7392, 208)
    """
    return width + 4 * -(-width // BLOCK)


def _columns(scales: Float[Array, "T B"], width: int) -> Float[Array, "T D"]:
    """Each block's scale, at each of its columns."""
    return jnp.repeat(scales, BLOCK, axis=1)[:, :width]


def quantise(x: Float[Array, "T D"]) -> tuple[Float8e4m3fn[Array, "T D"], Float[Array, "T B"]]:
    """q = e4m3(x / scale), scale = max(amax / 448, 2^-100) for each 128 columns of a row; the last may be fewer.

    Args:
      x: [T, D], any float dtype.

    Returns:
      q [T, D] float8_e4m3fn and scales [T, B] float32, B = ⌈D/128⌉. |q · scale - x| <= max(2^-4 |x|, 2^-10 scale). The
      scale of a block with a NaN or an infinity is NaN.

    Example:
      >>> q, scales = quantise(jnp.array([[1.0, -4.48], [0.0, 0.0]]))
      >>> q.astype(float).tolist(), [round(s, 4) for s in scales[0].tolist()]
      ([[96.0, -448.0], [0.0, 0.0]], [0.01])

    References: the 1 × 128 tiles of DeepSeek-V3 (2024).
    """
    T, D = x.shape
    wide = x.astype(jnp.float32)
    blocks = -(-D // BLOCK)
    tiles = jnp.pad(jnp.abs(wide), ((0, 0), (0, blocks * BLOCK - D))).reshape(T, blocks, BLOCK)
    scales = jnp.maximum(tiles.max(axis=-1) / LARGEST, SMALLEST_SCALE)
    # Looked at by themselves: XLA's vectorised maximum on a CPU loses a NaN.
    scales = jnp.where(jnp.isfinite(tiles).all(axis=-1), scales, jnp.nan)
    return (wide / _columns(scales, D)).astype(jnp.float8_e4m3fn), scales


def dequantise(
    q: Float8e4m3fn[Array, "T D"], scales: Float[Array, "T B"], dtype: DTypeLike = jnp.float32
) -> Float[Array, "T D"]:
    """x[t, c] = q[t, c] · scales[t, c div 128], multiplied in float32 and rounded once to `dtype`.

    Args:
      q: [T, D] float8_e4m3fn.
      scales: [T, B] float32.
      dtype: of the result.

    Returns:
      [T, D].

    Example:
      >>> dequantise(*quantise(jnp.array([[4.0, 0.0, -2.0, 3.0]]))).tolist()[0][2:]
      [-2.0, 2.857142925262451]
    """
    return (q.astype(jnp.float32) * _columns(scales, q.shape[1])).astype(dtype)


def quantisation_error(x: Float[Array, "T D"]) -> Float[Array, ""]:
    """‖dequantise(quantise(x)) - x‖ / ‖x‖ in float32: what the wire costs these rows; 0 where x is 0.

    Args:
      x: [T, D], any float dtype.

    Returns:
      A float32. About 0.026 for normally distributed rows.

    Example:
      >>> x = jax.random.normal(jax.random.key(0), (64, 256))
      >>> 0.02 < quantisation_error(x) < 0.03
      Array(True, dtype=bool)
    """
    wide = x.astype(jnp.float32)
    norm = jnp.linalg.norm(wide)
    return jnp.linalg.norm(dequantise(*quantise(x)) - wide) / jnp.where(norm == 0, 1, norm)


def pack(x: Float[Array, "T D"]) -> UInt8[Array, "T P"]:
    """The bytes of each row's e4m3 values and of its scales behind them, P = D + 4·⌈D/128⌉."""
    q, scales = quantise(x)
    bits = lax.bitcast_convert_type(scales, jnp.uint8).reshape(x.shape[0], -1)
    return jnp.concatenate([lax.bitcast_convert_type(q, jnp.uint8), bits], axis=1)


def unpack(packed: UInt8[Array, "N P"], width: int, dtype: DTypeLike) -> Float[Array, "N D"]:
    """The rows of width D that were packed, in `dtype`. Rows of zero bytes are rows of zeros."""
    q, bits = packed[:, :width], packed[:, width:].reshape(packed.shape[0], -1, 4)
    scales = lax.bitcast_convert_type(bits, jnp.float32)
    return dequantise(lax.bitcast_convert_type(q, jnp.float8_e4m3fn), scales, dtype)


def check_wire(transport: ModuleType, wire_dtype: WireDtype, wire_dtype_combine: WireDtype = None) -> None:
    """Raise unless the transport can carry the rows of dispatch, and of combine, in these dtypes.

    Raises:
      ValueError: a dtype other than None and "float8_e4m3fn".
      NotImplementedError: this transport adds rows up on their way. The message names one that does not.
    """
    check_wire_dtype("wire_dtype", wire_dtype)
    check_wire_dtype("wire_dtype_combine", wire_dtype_combine)
    if wire_dtype is not None and not getattr(transport, "MOVES_BITS", True):
        raise NotImplementedError(
            f"wire_dtype={wire_dtype!r} needs a transport that moves rows; got {transport.NAME!r}, which sends them by "
            "all-reduce, and fp8 rows with scales of their own have no sum. Use 'all_gather', or wire_dtype=None."
        )
    if wire_dtype_combine is not None and not hasattr(transport, "bring_back"):
        raise NotImplementedError(
            f"a combine in {wire_dtype_combine!r} needs a transport that brings partial sums home before it adds them; "
            f"got {transport.NAME!r}, whose reduction adds them on the way, and fp8 rows with scales of their own have "
            "no such sum. Use 'all_to_all' or 'ragged', or leave the combine unquantised (None)."
        )


def _straight_through(quantised: Callable, exact: Callable, x: jax.Array, handle: Handle) -> jax.Array:
    """quantised(x, handle), with the gradient of the linear map exact(x, handle)."""
    shape, dtype, over = x.shape, x.dtype, tuple(varying_axes(x))

    def backward(handle, g):
        # A linear map has the same transpose everywhere, so no x is kept; XLA drops the product with these zeros.
        nothing = vary(jnp.zeros(shape, dtype), over)
        return jax.vjp(lambda x: exact(x, handle), nothing)[1](g)[0], None

    run = jax.custom_vjp(quantised)
    run.defvjp(lambda x, handle: (quantised(x, handle), handle), backward)
    return run(x, handle)


def _travels(handle: Handle) -> bool:
    return rank_and_size(handle.axes)[1] > 1


def send(transport: ModuleType, x: Float[Array, "T D"], handle: Handle) -> Float[Array, "N D"]:
    """The transport's `send` of quantised rows: received = unpack(send(pack(x))).

    The gradient is straight-through: dx = sendᵀ(dreceived), the exact transpose of the unquantised `send`.

    Args:
      transport: a transport's module.
      x: [T, D].
      handle: from its `arrange`.

    Returns:
      [N, D] in the dtype of x.

    Example: `jaxmoe.dispatch(…, wire_dtype="float8_e4m3fn")`.
    """
    if not _travels(handle):
        return transport.send(x, handle)

    def quantised(x, handle):
        return unpack(transport.send(pack(x), handle), x.shape[1], x.dtype)

    return _straight_through(quantised, transport.send, x, handle)


def collect(transport: ModuleType, partial: Float[Array, "N D"], handle: Handle) -> Float[Array, "T D"]:
    """The transport's `collect` of quantised rows: y[t] = Σ_d unpack(bring_back(pack(partial)))[row of (t, d)].

    Added up in float32 on the home rank, in rank order, and rounded once. The gradient is straight-through:
    dpartial = collectᵀ(dy), the exact transpose of the unquantised `collect`.

    Args:
      transport: a transport's module with `bring_back` and `add_up`.
      partial: [N, D].
      handle: from its `arrange`.

    Returns:
      [T, D] in the dtype of partial.

    Example: `jaxmoe.combine(…, wire_dtype="float8_e4m3fn")`.
    """
    if not _travels(handle):
        return transport.collect(partial, handle)

    def quantised(partial, handle):
        back = unpack(transport.bring_back(pack(partial), handle), partial.shape[1], jnp.float32)
        return transport.add_up(back, handle).astype(partial.dtype)

    return _straight_through(quantised, transport.collect, partial, handle)
