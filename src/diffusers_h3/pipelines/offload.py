"""Group offload of a model that works in other methods than `forward`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from diffusers import ModelMixin
from diffusers.hooks import HookRegistry
from diffusers.hooks.group_offloading import _GROUP_OFFLOADING


def offload_as_one_group(model: ModelMixin, methods: tuple[str, ...], **options) -> None:
    """Keep all weights of `model` off the device but while it runs, whether as `forward` or as one of `methods`.

    Each such call moves every weight there once and back once, however often it runs a layer.

    Args:
        model (`ModelMixin`): A model none of whose children is a list of blocks: to Diffusers it is one group.
        methods (`tuple[str, ...]`): Names of the methods that start its work.
        options: What `ModelMixin.enable_group_offload` takes, except for the kind of groups and streams: with a single
            group there is nothing to bring while it is in use.
    """
    options.update(offload_type="block_level", num_blocks_per_group=1, use_stream=False, record_stream=False)
    model.enable_group_offload(**options)
    for name in methods:
        setattr(model, name, partial(_run_on_device, model, getattr(model, name)))


def _run_on_device(model: ModelMixin, method: Callable, *args, **kwargs) -> Any:
    """Call `method` between the two ends of the hook that Diffusers put around `forward`."""
    # Looked up in every call: loading a LoRA replaces the hook.
    hook = HookRegistry.check_if_exists_or_initialize(model).get_hook(_GROUP_OFFLOADING)
    if hook is None:
        return method(*args, **kwargs)
    try:
        args, kwargs = hook.pre_forward(model, *args, **kwargs)
        return method(*args, **kwargs)
    finally:
        # Also after an error: what comes next may need the memory.
        hook.post_forward(model, None)
