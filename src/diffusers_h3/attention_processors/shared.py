"""What Diffusers' attention processors must share with the processor they replace."""

import functools

from diffusers.models.attention import AttentionModuleMixin


_HEIRS: list[type] = []


def inherits_parallel_config(processor_class: type) -> type:
    """Class decorator: an instance set after `enable_parallelism` takes the previous processor's configuration.

    `enable_parallelism` shards the model's sequence with hooks and tells the processors of that moment. Diffusers'
    `set_attn_processor` does not tell later ones, which would attend to their own shard alone: a wrong video and no
    error. A class that takes no configuration may refuse it in its `_parallel_config` setter. Other processors are
    set as before.
    """
    if not _HEIRS:
        AttentionModuleMixin.set_processor = _passing_on(AttentionModuleMixin.set_processor)
    _HEIRS.append(processor_class)
    return processor_class


def _passing_on(set_processor):
    @functools.wraps(set_processor)
    def set_processor_and_parallel_config(self, processor, *args, **kwargs):
        config = getattr(getattr(self, "processor", None), "_parallel_config", None)
        if config is not None and isinstance(processor, tuple(_HEIRS)):
            processor._parallel_config = config
        return set_processor(self, processor, *args, **kwargs)

    return set_processor_and_parallel_config
