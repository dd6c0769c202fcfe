"""Schedules: the issue order of (lane, stage) slots, and the executor that keeps it."""

from jaxmoe.schedules.token_chunks import Schedule as Schedule
from jaxmoe.schedules.token_chunks import Sequential as Sequential
from jaxmoe.schedules.token_chunks import TokenChunks as TokenChunks
from jaxmoe.schedules.weave import Orders as Orders
from jaxmoe.schedules.weave import Stage as Stage
from jaxmoe.schedules.weave import weave as weave
