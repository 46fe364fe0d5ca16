"""Forward and backward passes, on a card replayed as CUDA graphs: networks this small only wait for their launches."""

from collections.abc import Callable, Hashable, Iterable

import torch


# Losses of one part of a batch; the entry "loss" is the one that is differentiated.
Losses = dict[str, torch.Tensor]

# Before a capture every kernel has run: libraries choose algorithms and take their workspaces the first time.
_WARM_UPS = 2


class Backward:
    """Call a function of tensors and add the gradients of its loss to those the parameters have.

    Args:
        losses (`Callable`): Called with a key and tensors; returns the losses. In a graph it must not read from the
            card, nor draw random numbers.
        parameters (`Iterable[torch.nn.Parameter]`): What is trained. Their gradients become zeros that stay in place.
        graphed (`bool`): Capture a graph for every key and shapes at first sight, and replay it from then on.
    """

    def __init__(self, losses: Callable[..., Losses], parameters: Iterable[torch.nn.Parameter], graphed: bool = False):
        self._losses = losses
        self._parameters = list(parameters)
        self._graphed = graphed
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Losses]] = {}
        self._pool = None
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)

    def __call__(self, key: Hashable, tensors: tuple[torch.Tensor, ...]) -> Losses:
        """Return the losses of one part, detached."""
        if not self._graphed:
            return self._run(key, tensors)
        name = (key, *(tensor.shape for tensor in tensors))
        if name not in self._captured:
            self._captured[name] = self._capture(key, tensors)
        graph, inputs, outputs = self._captured[name]
        torch._foreach_copy_(inputs, list(tensors))
        graph.replay()
        # The next replay writes to the same memory.
        return {name: value.clone() for name, value in outputs.items()}

    def _run(self, key: Hashable, tensors: Iterable[torch.Tensor]) -> Losses:
        losses = self._losses(key, *tensors)
        losses["loss"].backward()
        return {name: value.detach() for name, value in losses.items()}

    def _capture(
        self, key: Hashable, tensors: tuple[torch.Tensor, ...]
    ) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor], Losses]:
        inputs = [tensor.clone() for tensor in tensors]
        gradients = [parameter.grad.clone() for parameter in self._parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._run(key, inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch._foreach_copy_([parameter.grad for parameter in self._parameters], gradients)
        graph = torch.cuda.CUDAGraph()
        # One pool: no two graphs run at once, and what they return lives on.
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = self._run(key, inputs)
        self._pool = self._pool or graph.pool()
        return graph, inputs, outputs
