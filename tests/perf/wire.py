"""Bytes on the wire, read from a compiled program: an account of its own, beside the formulas of jaxmoe.perf.cost."""

import math
import re

ITEMSIZE = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
COLLECTIVES = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute|ragged-all-to-all"
_LINE = re.compile(rf"= (?P<result>.*?) (?P<op>{COLLECTIVES})(?P<start>-start)?\(")


def _result_bytes(shapes: str) -> int:
    return sum(
        ITEMSIZE[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes)
    )


def _group_size(line: str) -> int:
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)
    if named:
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", named[2]))
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if listed:
        return len(listed[1].split(","))
    return int(re.search(r"replica_groups=\[\d+,(\d+)\]", line)[1])


def bytes_by_collective(hlo: str) -> dict[str, int]:
    """op -> bytes that one rank sends to others, from the type of each collective's result."""
    found: dict[str, int] = {}
    for line in hlo.splitlines():
        match = _LINE.search(line)
        if not match:
            continue
        op, result, R = match["op"], _result_bytes(match["result"]), _group_size(line)
        assert not match["start"], "asynchronous collectives have operands in their results"
        sent = {
            "all-gather": result * (R - 1) // R,  # the result is R operands
            "reduce-scatter": result * (R - 1),  # the result is an R-th of the operand
            "all-reduce": 2 * result * (R - 1) // R,
            "all-to-all": result * (R - 1) // R,
        }[op]
        found[op] = found.get(op, 0) + sent
    return found
