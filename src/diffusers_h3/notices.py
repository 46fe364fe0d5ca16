"""Messages given once per process, from eager code and, while it is traced, from compiled code."""

import functools
import logging

import torch


logger = logging.getLogger(__name__)


@functools.cache
def _log(level: int, message: str) -> None:
    logger.log(level, message)


# Evaluated while a graph is traced and absent from it, so that a message does not break the graph.
@torch.compiler.assume_constant_result
def warn_once(message: str) -> None:
    """Warn, unless the same message was given before."""
    _log(logging.WARNING, message)


@torch.compiler.assume_constant_result
def inform_once(message: str) -> None:
    """Log a decision, unless the same one was logged before."""
    _log(logging.INFO, message)
