"""Attention masks as the kernels take them: one boolean ``[Q, K]`` matrix per batch item, True where a query looks."""

import torch


def with_query_axis(
    mask: torch.Tensor, batch: int, num_heads: int, num_queries: int, num_keys: int
) -> torch.Tensor | None:
    """View a mask as ``[1 or B, 1 or Q, K]``; None where it differs between heads.

    Args:
        mask (`torch.Tensor`): ``[B, K]``, or ``[1 or B, 1, 1 or Q, K]``.
        batch, num_heads, num_queries, num_keys (`int`): B, H, Q and K of the attention call.

    Raises:
        ValueError: For any other shape, naming both.
    """
    shape = tuple(mask.shape)
    if shape == (batch, num_keys):
        return mask[:, None]
    if (
        mask.ndim == 4
        and shape[0] in (1, batch)
        and shape[1] in (1, num_heads)
        and shape[2] in (1, num_queries)
        and shape[3] == num_keys
    ):
        return mask[:, 0] if shape[1] == 1 else None
    raise ValueError(
        f"An attention mask for {batch} item(s), {num_queries} queries and {num_keys} keys must be of shape "
        f"{(batch, num_keys)}, {(batch, 1, 1, num_keys)} or {(batch, 1, num_queries, num_keys)}, the last two also "
        f"with a batch of 1; got {shape}."
    )


def is_zero_or_minus_infinity(mask: torch.Tensor) -> bool:
    """Whether an additive mask only keeps and drops keys. Waits for the device."""
    return bool(((mask == 0) | (mask == float("-inf"))).all())


def boolean_matrix(mask: torch.Tensor | None, num_queries: int, num_keys: int, causal: bool, device: torch.device):
    """Expand one item's mask to a contiguous boolean ``[Q, K]``.

    Args:
        mask (`torch.Tensor`, *optional*): Boolean ``[1 or Q, K]``; None keeps every key.
        causal (`bool`): Whether query i also sees no key after i, counted from the first (PyTorch's `is_causal`).
    """
    if mask is None:
        mask = torch.ones(1, num_keys, dtype=torch.bool, device=device)
    mask = mask.expand(num_queries, num_keys)
    return mask.tril() if causal else mask.contiguous()
