"""The hybrid attention configuration: what the softmax window sees and how the linear branch carries the rest."""

from dataclasses import asdict, dataclass
from typing import Any


ANCHOR_MODES = ("none", "columns", "rows", "both")
DELTA_RULES = ("vdn_solve", "vdn_scaled", "sana_scaled")
BRIDGES = ("alpha", "none")
SHORT_CONV_TARGETS = ("q", "k", "v")

TRANSFORM_TYPE = "hybrid_attention"
TRANSFORM_VERSION = 2

# Where each field sits in the nested `config` dictionary of a version 2 transform (`model_spec.json` of a release).
_PATHS = {
    "anchor_frames": ("anchor_frames",),
    "enable_softmax_gate": ("enable_softmax_gate",),
    "chunk": ("softmax_attention", "chunk"),
    "radius": ("softmax_attention", "radius"),
    "a_fp32": ("linear_attention", "a_fp32"),
    "bridge": ("linear_attention", "bridge"),
    "delta_rule": ("linear_attention", "delta_rule"),
    "enable_text_state": ("linear_attention", "enable_text_state"),
    "linear_head_dim": ("linear_attention", "linear_head_dim"),
    "short_conv_targets": ("linear_attention", "short_conv", "targets"),
}


@dataclass(frozen=True)
class HybridAttentionConfig:
    """Describe one hybrid attention layer: a chunked softmax window plus the Video Delta linear branch.

    The defaults are the released VDN-H3 configuration. Every illegal value raises a `ValueError` naming the field.

    Args:
        chunk (`int`): Latent frames per window chunk; `0` centres a window of `2·radius + 1` frames on every frame.
        radius (`int`): Chunks (frames when `chunk` is 0) a query sees on each side of its own.
        anchor_frames (`str`): What the first and the last latent frame are exempt from. `"columns"`: every query sees
            them; `"rows"`: they see everything; `"both"`; `"none"`.
        enable_softmax_gate (`bool`): Multiply the window's output by a per-head sigmoid gate.
        delta_rule (`str`): How a frame's statistics update the state: `"vdn_solve"`, `"vdn_scaled"` or
            `"sana_scaled"`.
        bridge (`str`): `"alpha"` decays a boundary state through the frames the window already covers; `"none"` reads
            it as it was written.
        a_fp32 (`bool`): Accumulate the key Gram matrices in float32. They are inverted, so the release does.
        enable_text_state (`bool`): Start both scans from the text rows' state instead of zero.
        linear_head_dim (`int`): Channels per head of the linear branch, equal to the transformer's head dimension.
        short_conv_targets (`tuple[str, ...]`): Which of `"q"`, `"k"`, `"v"` pass through the short convolutions.

    Examples:
        >>> from diffusers_h3 import HybridAttentionConfig
        >>> config = HybridAttentionConfig(chunk=4, anchor_frames="columns")
        >>> config.anchor_columns, config.anchor_rows
        (True, False)
        >>> HybridAttentionConfig(chunk=-1)
        Traceback (most recent call last):
            ...
        ValueError: `chunk` must be an integer of at least 0, got -1.
    """

    chunk: int = 5
    radius: int = 1
    anchor_frames: str = "both"
    enable_softmax_gate: bool = True
    delta_rule: str = "vdn_solve"
    bridge: str = "alpha"
    a_fp32: bool = True
    enable_text_state: bool = True
    linear_head_dim: int = 128
    short_conv_targets: tuple[str, ...] = ("k", "v")

    def __post_init__(self):
        for name, minimum in (("chunk", 0), ("radius", 0), ("linear_head_dim", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"`{name}` must be an integer of at least {minimum}, got {value!r}.")
        for name in ("enable_softmax_gate", "a_fp32", "enable_text_state"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be true or false, got {getattr(self, name)!r}.")
        for name, allowed in (("anchor_frames", ANCHOR_MODES), ("delta_rule", DELTA_RULES), ("bridge", BRIDGES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {list(allowed)}, got {getattr(self, name)!r}.")
        targets = self.short_conv_targets
        if not isinstance(targets, (list, tuple)) or not all(isinstance(name, str) for name in targets):
            raise ValueError(f"`short_conv_targets` must be a list of names, got {targets!r}.")
        if len(set(targets)) != len(targets) or not set(targets) <= set(SHORT_CONV_TARGETS):
            raise ValueError(
                f"`short_conv_targets` must hold names of {list(SHORT_CONV_TARGETS)} at most once, got {targets!r}."
            )
        # One order for equal sets, so that equal configurations compare and hash equal.
        object.__setattr__(
            self, "short_conv_targets", tuple(name for name in SHORT_CONV_TARGETS if name in set(targets))
        )

    @property
    def anchor_columns(self) -> bool:
        """Whether every query sees the anchor frames."""
        return self.anchor_frames in ("columns", "both")

    @property
    def anchor_rows(self) -> bool:
        """Whether the anchor frames see everything."""
        return self.anchor_frames in ("rows", "both")

    @classmethod
    def from_dict(cls, transform: dict[str, Any]) -> "HybridAttentionConfig":
        """Read a version 2 transform, or the bare `config` dictionary inside it.

        Args:
            transform (`dict`): `{"type": "hybrid_attention", "version": 2, "config": {...}}` or the inner dictionary.

        Raises:
            ValueError: For another type or version, for a missing or unknown field and for an illegal value.

        Examples:
            >>> from diffusers_h3 import HybridAttentionConfig
            >>> config = HybridAttentionConfig(radius=2)
            >>> HybridAttentionConfig.from_dict(config.to_dict()) == config
            True
        """
        if not isinstance(transform, dict):
            raise ValueError(f"A hybrid attention transform must be a dictionary, got {type(transform).__name__}.")
        if "config" in transform or "type" in transform:
            if transform.get("type") != TRANSFORM_TYPE or transform.get("version") != TRANSFORM_VERSION:
                raise ValueError(
                    f"Expected a transform of type {TRANSFORM_TYPE!r}, version {TRANSFORM_VERSION}, got type "
                    f"{transform.get('type')!r}, version {transform.get('version')!r}."
                )
            unknown = sorted(set(transform) - {"type", "version", "config"})
            if unknown or "config" not in transform:
                raise ValueError(f"A transform holds exactly 'type', 'version' and 'config', got {sorted(transform)}.")
            transform = transform["config"]
            if not isinstance(transform, dict):
                raise ValueError(f"The transform's 'config' must be a dictionary, got {type(transform).__name__}.")

        found = dict(_leaves(transform))
        expected = {path: name for name, path in _PATHS.items()}
        unknown, missing = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
        if unknown or missing:
            problems = [f"unknown {'.'.join(path)}" for path in unknown]
            problems += [f"missing {'.'.join(path)}" for path in missing]
            raise ValueError(f"The hybrid attention config does not match version 2: {', '.join(problems)}.")
        return cls(**{name: found[path] for path, name in expected.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the version 2 transform, JSON-serialisable and accepted by `from_dict`.

        Examples:
            >>> from diffusers_h3 import HybridAttentionConfig
            >>> HybridAttentionConfig().to_dict()["config"]["softmax_attention"]
            {'chunk': 5, 'radius': 1}
        """
        config: dict[str, Any] = {}
        for name, value in asdict(self).items():
            *parents, leaf = _PATHS[name]
            node = config
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = list(value) if isinstance(value, tuple) else value
        return {"type": TRANSFORM_TYPE, "version": TRANSFORM_VERSION, "config": config}


def _leaves(node: dict[str, Any], prefix: tuple[str, ...] = ()):
    """Yield `(path, value)` for every leaf of nested dictionaries."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value
