"""The one rule for the dtype in which statistics, decays and states are computed."""

import functools

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for half and single precision and float64 for double precision."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(function):
    """Decorator: run an operator in the dtypes it chooses itself, also inside `torch.autocast`.

    Autocast would round the float32 products of statistics and states to half precision.
    """

    @functools.wraps(function)
    def run(first: torch.Tensor, *arguments, **options):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *arguments, **options)

    return run
