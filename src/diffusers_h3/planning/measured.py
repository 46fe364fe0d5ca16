"""The measurements estimates start from: `measured.json`, made of the benchmark results by a script."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from .workload import Clip, resolve_clip


@dataclass(frozen=True)
class Measurement:
    """One run of the full-size transformer.

    Args:
        card (`str`): The device's name, as its driver gives it.
        date (`str`): Year, month and day.
        versions (`dict[str, str]`): Of the libraries that were recorded.
        model (`str`): `"hybrid"` (VDN-H3) or `"dense"` (stock MiniMax-H3).
        height, width, frames, text_rows, rows (`int`): The request; `rows` is the length of the packed sequence.
        precision, attention_precision (`str`): `"bf16"` or `"fp8"`.
        offload (`str`): `"none"`, `"block"` or `"leaf"`.
        compiled (`bool`, *optional*): Whether the blocks were compiled; null where it was not recorded.
        memory_cap_gb (`float`, *optional*): The memory the allocator was allowed.
        seconds_per_call, peak_gb, weights_gb (`float`): GB of 10^9 bytes; of the weights, what is on the GPU at once.
        use_stream (`bool`): Whether the offload brought the next weights while one group was in use.
        compiled_parts (`str`, *optional*): `"layers"` where the linear layers were compiled instead of the blocks.
    """

    card: str
    date: str
    versions: dict[str, str]
    model: str
    height: int
    width: int
    frames: int
    text_rows: int
    rows: int
    precision: str
    attention_precision: str
    offload: str
    compiled: bool | None
    memory_cap_gb: float | None
    seconds_per_call: float
    peak_gb: float
    weights_gb: float
    use_stream: bool = False
    compiled_parts: str | None = None

    @property
    def clip(self) -> Clip:
        """The request as the planner sees it."""
        return resolve_clip(self.height, self.width, self.frames, self.text_rows)

    @property
    def is_compiled(self) -> bool:
        """Whether the blocks were compiled, or their linear layers alone, as offload by leaf needs it."""
        return self.compiled is not False or self.compiled_parts == "layers"

    @property
    def activation_bytes(self) -> float:
        """Peak above the weights."""
        return (self.peak_gb - self.weights_gb) * 1e9


@cache
def measurements() -> tuple[Measurement, ...]:
    """Return all measurements that come with the package."""
    text = (resources.files(__package__) / "measured.json").read_text(encoding="utf-8")
    return tuple(Measurement(**entry) for entry in json.loads(text))
