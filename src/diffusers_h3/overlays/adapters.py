"""Low-rank adapters on disk: their specification, and which pair of tensors changes which weight by how much."""

import logging
import re
from dataclasses import dataclass
from typing import Any

from .errors import IncompatibleWeightsError, ManifestError, some_of
from .sources import Folder, read_folder_json
from .tensor_file import TensorEntry


logger = logging.getLogger(__name__)

# The file was renamed in September 2026; its content stayed the same.
SPEC_FILES = ("adapter_spec.json", "adapter_config.json")
MERGEABLE_DTYPES = ("F32", "F16", "BF16")

_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.(?:(?P<adapter>[^.]+)\.)?weight")


@dataclass(frozen=True)
class AdapterSpec:
    """The declared ranks and alphas; patterns override by module name. Null where nothing was declared."""

    rank: int | None
    alpha: float | None
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]

    def declared_rank(self, *names: str) -> int | None:
        """Return the rank declared for a module known by any of `names`."""
        pattern = _matching_pattern(self.rank_pattern, names)
        return self.rank if pattern is None else self.rank_pattern[pattern]

    def scale(self, rank: int, *names: str) -> float:
        """Return ``alpha / rank`` of a module; where no alpha is declared it is the module's own rank, so 1."""
        pattern = _matching_pattern(self.alpha_pattern, names)
        alpha = self.alpha if pattern is None else self.alpha_pattern[pattern]
        return 1.0 if alpha is None else alpha / rank


@dataclass(frozen=True)
class Pair:
    """Add ``scale · B @ A`` to the weight `target`; `lora_a` and `lora_b` are keys of the adapter's file."""

    target: str
    lora_a: str
    lora_b: str
    scale: float


def read_adapter_spec(folder: Folder) -> AdapterSpec:
    """Read an adapter's specification under its present or its former file name."""
    content = read_folder_json(folder, SPEC_FILES)
    config = content.get("config")
    if not isinstance(config, dict):
        raise ManifestError(
            f"{folder.location}: the adapter specification must hold `config` with rank, alpha, rank_pattern and "
            f"alpha_pattern; found {some_of(content) or 'nothing'}."
        )
    unknown = sorted(set(config) - {"rank", "alpha", "rank_pattern", "alpha_pattern"})
    if unknown:
        raise ManifestError(f"{folder.location}: unknown adapter setting {some_of(unknown)}.")
    patterns = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    numbers = [config.get("rank"), config.get("alpha")]
    for name, pattern in patterns.items():
        if not isinstance(pattern, dict):
            raise ManifestError(f"{folder.location}: `{name}` must be an object, got {pattern!r}.")
        numbers += pattern.values()
        for key in pattern:
            try:
                re.compile(key)
            except re.error as error:
                raise ManifestError(
                    f"{folder.location}: `{name}` key {key!r} is no valid pattern: {error}."
                ) from error
    if any(not _is_positive_number(number) for number in numbers if number is not None):
        raise ManifestError(f"{folder.location}: every rank and alpha must be a positive number, got {numbers}.")
    return AdapterSpec(config.get("rank"), config.get("alpha"), **patterns)


def pair_tensors(
    adapter: str, location: str, spec: AdapterSpec, tensors: dict[str, TensorEntry], base: dict[str, TensorEntry]
) -> list[Pair]:
    """Match every tensor of an adapter to a weight of the base transformer.

    Args:
        adapter (`str`): The adapter's name, which its keys may carry (`….lora_A.<name>.weight`).
        location (`str`): What to call the adapter in messages.
        spec (`AdapterSpec`): Declared ranks and alphas.
        tensors, base (`dict[str, TensorEntry]`): Headers of the adapter's file and of the base transformer.

    Raises:
        IncompatibleWeightsError: One message with everything that does not fit: foreign tensors, halves of a pair,
            modules the base lacks, shapes and ranks that differ.
    """
    problems: dict[str, list[str]] = {}
    halves: dict[str, dict[str, str]] = {}
    spellings: dict[str, str] = {}
    for key in tensors:
        match = _KEY.fullmatch(key)
        if match is None or match["adapter"] not in (None, adapter):
            problems.setdefault(f"tensors that are no part of an adapter named {adapter!r}", []).append(key)
            continue
        # The release trained on blocks that wrap the stock attention as `attn.orig`.
        module = match["module"].replace(".attn.orig.", ".attn.")
        spellings.setdefault(module, match["module"])
        if match["side"] in halves.setdefault(module, {}):
            problems.setdefault("modules adapted twice", []).append(module)
        halves[module][match["side"]] = key

    pairs = []
    for module, keys in halves.items():
        weight = base.get(f"{module}.weight")
        if len(keys) == 1:
            problems.setdefault("tensors without their other half", []).append(*keys.values())
        elif weight is None:
            problems.setdefault("modules the base does not have", []).append(module)
        else:
            lora_a, lora_b = tensors[keys["A"]], tensors[keys["B"]]
            names = (module, spellings[module])
            kind, problem = _misfit(module, lora_a, lora_b, weight, spec.declared_rank(*names))
            if problem:
                problems.setdefault(kind, []).append(problem)
            else:
                scale = spec.scale(lora_a.shape[0], *names)
                pairs.append(Pair(f"{module}.weight", keys["A"], keys["B"], scale))
    if problems:
        found = "; ".join(f"{len(names)} {kind} ({some_of(names)})" for kind, names in problems.items())
        raise IncompatibleWeightsError(
            f"Adapter {adapter!r} ({location}) does not fit the base transformer: {found}. "
            "Use the base its overlay names; pruned or otherwise changed bases cannot take it."
        )
    known = [*halves, *spellings.values()]
    for pattern in [*spec.rank_pattern, *spec.alpha_pattern]:
        if _matching_pattern([pattern], known) is None:
            logger.warning("Adapter %r (%s): pattern %r matches none of its modules.", adapter, location, pattern)
    return pairs


def _misfit(
    module: str, lora_a: TensorEntry, lora_b: TensorEntry, weight: TensorEntry, declared_rank: int | None
) -> tuple[str, str]:
    """Return what keeps a pair from being merged, as a kind and a description; empty where nothing does."""
    stored = {entry.dtype for entry in (lora_a, lora_b, weight)}
    if not stored <= set(MERGEABLE_DTYPES):
        return f"modules stored in a type that cannot be merged exactly ({', '.join(sorted(stored))})", module
    shapes = [list(entry.shape) for entry in (weight, lora_b, lora_a)]
    if (
        [len(shape) for shape in shapes] != [2, 2, 2]
        or not lora_a.shape[0]
        or shapes
        != [
            [lora_b.shape[0], lora_a.shape[1]],
            [lora_b.shape[0], lora_a.shape[0]],
            [lora_a.shape[0], lora_a.shape[1]],
        ]
    ):
        return "modules of another shape", f"{module}: weight {shapes[0]}, B {shapes[1]}, A {shapes[2]}"
    if declared_rank is not None and declared_rank != lora_a.shape[0]:
        return "modules of another rank", f"{module}: rank {lora_a.shape[0]}, declared {declared_rank}"
    return "", ""


def _matching_pattern(patterns, names) -> str | None:
    """Return the first pattern that, as in PEFT, matches the end of a name from the start of one of its parts."""
    for pattern in patterns:
        if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
            return pattern
    return None


def _is_positive_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
