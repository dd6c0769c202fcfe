"""Permute and combine on one rank."""

from jaxmoe.permute.api import BACKENDS as BACKENDS
from jaxmoe.permute.api import combine_rows as combine_rows
from jaxmoe.permute.api import permute as permute
