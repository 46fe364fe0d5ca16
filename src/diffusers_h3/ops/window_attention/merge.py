"""Join the attention results over two disjoint key sets and apply the gate."""

from collections.abc import Sequence

import torch

from ..precision import accumulation_dtype
from ..triton_support import use_triton


def merge_gated(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], gate: torch.Tensor | None, output: torch.Tensor
) -> None:
    """Write ``Σᵢ softmax(lse)ᵢ·outputᵢ``, gated, to `output`.

    Args:
        parts (`Sequence`): One or two ``(output [L, H, D], log-sum-exp [L, H])`` pairs over disjoint key sets.
        gate (`torch.Tensor`, *optional*): ``[L, H]``; its sigmoid multiplies the result.
        output (`torch.Tensor`): ``[L, H, D]``, written in place.
    """
    tensors = [tensor for part in parts for tensor in part]
    if len(parts) == 2 and use_triton(output, *tensors):
        from .triton import merge_two

        merge_two(*parts[0], *parts[1], gate, output)
        return
    outputs = torch.stack([part[0] for part in parts]).to(accumulation_dtype(output.dtype))
    weights = torch.stack([part[1] for part in parts]).softmax(dim=0).unsqueeze(-1)
    merged = (outputs * weights.to(outputs.dtype)).sum(dim=0)
    if gate is not None:
        merged = merged * torch.sigmoid(gate.to(merged.dtype)).unsqueeze(-1)
    output.copy_(merged)
