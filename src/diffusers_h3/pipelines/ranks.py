"""One request on several ranks: what they must agree on before they share a transformer's sequence."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from diffusers import ModelMixin
from PIL import Image


class Ranks:
    """The processes that share a pipeline's transformer; without context parallelism, this one alone.

    Every rank encodes the prompt and denoises, so that all have the latents; rank 0 decodes. A request that differs
    among the ranks would wait forever for rows nobody sends, and another noise on each would be no noise at all.
    """

    def __init__(self, transformer: ModelMixin):
        parallel = transformer._parallel_config and transformer._parallel_config.context_parallel_config
        self._group = parallel._flattened_mesh.get_group() if parallel else None

    @property
    def decodes(self) -> bool:
        """Whether this rank is the one that decodes."""
        return self._group is None or torch.distributed.get_rank(self._group) == 0

    def agree(self, **arguments: Any) -> None:
        """Check that every rank was asked for the same.

        Raises:
            ValueError: On every rank, with the names of what differs.
        """
        if self._group is None:
            return
        digests = {name: _digest(value) for name, value in arguments.items()}
        everyone = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(everyone, digests, group=self._group)
        differing = [name for name in digests if len({others[name] for others in everyone}) > 1]
        if differing:
            raise ValueError(
                f"The ranks were asked for different videos: {', '.join(f'`{name}`' for name in differing)} must be "
                "the same on every rank, which share one request under `enable_parallelism`."
            )

    def share_generator(self, generator: torch.Generator | None) -> torch.Generator | None:
        """Return a generator that draws on every rank what rank 0's draws; `generator` itself is advanced with it."""
        if self._group is None:
            return generator
        if generator is None:
            generator = torch.Generator()
            generator.seed()
        states = [generator.get_state()]
        source = torch.distributed.get_global_rank(self._group, 0)
        torch.distributed.broadcast_object_list(states, src=source, group=self._group)
        generator.set_state(states[0])
        return generator

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do work of all ranks; where one is lost, say so instead of what its connection reported.

        Raises:
            RuntimeError: If another rank ended, or did not answer within the process group's timeout.
        """
        try:
            yield
        except RuntimeError as error:
            if self._group is None or not _is_lost_connection(error):
                raise
            raise RuntimeError(
                "Another process of this job ended or stopped answering, so this one cannot go on. The first error "
                f"among the messages of all processes is the cause; this one only saw: {str(error).splitlines()[0]}"
            ) from error


def _is_lost_connection(error: RuntimeError) -> bool:
    # NCCL's errors have a class of their own; Gloo's have only their text.
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()


def _digest(value: Any) -> str:
    """Return a text that differs where `value` does: numbers and texts, images, and tensors."""
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    elif isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous().view(torch.uint8).numpy()
    if not isinstance(value, np.ndarray):
        return repr(value)
    return f"{value.shape} {hashlib.sha256(np.ascontiguousarray(value)).hexdigest()}"
