"""Plans: what a layer derives from lengths alone, on the host."""

import functools
from collections.abc import Callable

import torch


def cached_plan(derive: Callable) -> Callable:
    """Keep what a function of hashable arguments returned, for all layers and steps of a request.

    Under `torch.compile` the function is traced as it is: Dynamo looks through a cache, and warns of it.
    """
    kept = functools.lru_cache(maxsize=32)(derive)

    @functools.wraps(derive)
    def plan(*arguments):
        return derive(*arguments) if torch.compiler.is_compiling() else kept(*arguments)

    return plan
