"""What differs between jax versions, or has no documented name yet. The only module that may reach for it."""

import jax


def varying_axes(array) -> frozenset[str]:
    """The manual mesh axes along which `array` is typed as differing; empty outside shard_map or with check_vma off."""
    return frozenset(jax.typeof(array).manual_axis_type.varying)
