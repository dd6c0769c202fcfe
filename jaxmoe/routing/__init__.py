"""Routing: scores, top-k, row maps. Knows nothing of devices."""

from jaxmoe.routing.check import check_routing as check_routing
from jaxmoe.routing.gating import Routing as Routing
from jaxmoe.routing.gating import gate as gate
from jaxmoe.routing.gating import scores_of as scores_of
from jaxmoe.routing.gating import select_experts as select_experts
from jaxmoe.routing.plan import RowMap as RowMap
from jaxmoe.routing.plan import apply_capacity as apply_capacity
from jaxmoe.routing.plan import count_tokens as count_tokens
from jaxmoe.routing.plan import row_map as row_map
