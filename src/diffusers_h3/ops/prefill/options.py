"""What a caller may ask of the FlashInfer prefill kernels."""

import os
from dataclasses import dataclass


PREFILL_ENVIRONMENT_VARIABLE = "DIFFUSERS_H3_FLASHINFER_PREFILL"

_CHOICES = {
    "prefill": ("auto", "single", "cudnn"),
    "kernel": ("auto", "fa2", "fa3"),
    "fp8": (False, True),
    "fallback": ("error", "sdpa"),
}


@dataclass(frozen=True)
class PrefillOptions:
    """How attention is computed; an explicit choice is followed or refused, never replaced.

    Args:
        prefill (`str`): `"single"` runs a kernel per batch item, `"cudnn"` one for the whole batch, `"auto"` decides.
        kernel (`str`): The kernel of `"single"`: `"fa2"`, `"fa3"`, or `"auto"` for the best one of the card.
        fp8 (`bool`): Whether queries, keys and values are quantised to float8 e4m3, with a scale per head.
        fallback (`str`): `"error"` raises what FlashInfer cannot do, `"sdpa"` runs it on PyTorch's attention.

    Raises:
        ValueError: For a value that is not one of these, and for a pair that excludes each other.
    """

    prefill: str = "auto"
    kernel: str = "auto"
    fp8: bool = False
    fallback: str = "error"

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if type(value) not in (str, bool) or value not in allowed:
                raise ValueError(f"`{name}` must be one of {list(allowed)}, got {value!r}.")
        if self.prefill == "cudnn" and self.kernel != "auto":
            raise ValueError(
                f"`kernel={self.kernel!r}` pins a kernel of `prefill='single'` and means nothing to "
                "`prefill='cudnn'`: leave one of the two at 'auto'."
            )
        if self.fp8 and (self.prefill == "cudnn" or self.kernel == "fa2"):
            raise ValueError(
                "`fp8=True` needs the fa3 kernel of `prefill='single'`: the others take no scale per head. "
                f"Got prefill={self.prefill!r}, kernel={self.kernel!r}."
            )

    @classmethod
    def with_environment(cls, prefill: str | None = None, **options) -> "PrefillOptions":
        """Return options in which `prefill=None` means `DIFFUSERS_H3_FLASHINFER_PREFILL`, or `"auto"` without it."""
        if prefill is None:
            prefill = os.environ.get(PREFILL_ENVIRONMENT_VARIABLE) or "auto"
            if prefill not in _CHOICES["prefill"]:
                raise ValueError(
                    f"The environment variable {PREFILL_ENVIRONMENT_VARIABLE} must be one of "
                    f"{list(_CHOICES['prefill'])}, got {prefill!r}: correct or unset it."
                )
        return cls(prefill=prefill, **options)
