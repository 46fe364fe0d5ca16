"""Check adapters before PEFT sees them: merged already, made for another model, or in an order that loses them."""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.hooks.group_offloading import _is_group_offload_enabled
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE, _best_guess_weight_name
from diffusers.utils.hub_utils import _get_model_file
from safetensors import safe_open
from safetensors.torch import load_file, save


if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


# How a release spells its adapters: the adapter's name in every key, the attention below another module.
_NAMED_LORA_KEY = re.compile(r"\.lora_[AB]\.([^.]+)\.weight$")
_RELEASE_ATTENTION = ".attn.orig."
# Names of the original checkpoint, which no release uses: PEFT's own `default` in such a key is not an overlay's.
_ORIGINAL_KEYS = ("diffusion_model.", "blocks.", "token_refiner.blocks.", "final_layer.", "lora_unet_")

# How Diffusers spells adapters; LoKr's other tensors are PEFT's own business.
_LORA_KEY = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_OTHER_KEYS = (".lora_B.bias", ".lokr_")
_FUSABLE_PROJECTIONS = ("to_q", "to_k", "to_v")

_FILE_ARGUMENTS = ("subfolder", "cache_dir", "force_download", "proxies", "local_files_only", "token", "revision")


def find_adapter_file(source: str | os.PathLike, options: dict[str, Any]) -> Path:
    """Return the local file that Diffusers' arguments mean, downloaded to the cache where it is on the Hub."""
    weight_name = options.get("weight_name") or _best_guess_weight_name(
        source, file_extension=".safetensors", local_files_only=options.get("local_files_only")
    )
    arguments = {name: options[name] for name in _FILE_ARGUMENTS if name in options}
    return Path(_get_model_file(source, weights_name=weight_name or LORA_WEIGHT_NAME_SAFE, **arguments))


def file_sha256(file: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def adapter_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file; none of another, which Diffusers itself refuses."""
    return load_file(file) if file.suffix == ".safetensors" else {}


def tensors_sha256(tensors: Mapping[str, torch.Tensor], prefix: str | None = None) -> str:
    """Return the hexadecimal sha256 of the safetensors file that holds these tensors, and no metadata.

    The names count without `prefix`, so that equal adapters have equal digests, whichever file they came in.
    """
    own = _without_prefix(tensors, prefix)
    # Copies, because adapters of fused projections share tensors, which safetensors refuses.
    plain = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in own.items()}
    return hashlib.sha256(save(plain)).hexdigest()


def adapter_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a safetensors file; none of another, which Diffusers itself refuses or reads."""
    if file.suffix != ".safetensors":
        return {}
    with safe_open(file, "pt") as tensors:
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118


def refuse_merged_adapter(fused: list[dict[str, str]], keys: Iterable[str], digests: Iterable[str] = ()) -> None:
    """Refuse an adapter that is merged already or spelled as no module is.

    Args:
        fused (`list[dict]`): The transformer's `fused_adapters`, each with `name` and `sha256`.
        keys (`Iterable[str]`): The adapter's tensor names.
        digests (`Iterable[str]`): The sha256 of its file and of its tensors, as far as known.

    Raises:
        ValueError: With the way out.
    """
    keys, digests = list(keys), set(digests)
    named = (_NAMED_LORA_KEY.search(key) for key in keys if not key.startswith(_ORIGINAL_KEYS))
    names = {match[1] for match in named if match}
    for adapter in fused:
        name, same = adapter["name"], adapter["sha256"] in digests
        if same or name in names:
            another = f" If it is another of that name, take `.{name}` out of its keys (`.lora_A.{name}.weight`)."
            raise ValueError(
                f"The adapter {name!r} is already merged into this transformer's weights: loading it again "
                f"would apply it twice.{'' if same else another}"
            )
    if any(_RELEASE_ATTENTION in key for key in keys):
        raise ValueError(
            "This adapter is spelled as in a VDN-H3 release, whose adapters have to be merged into the weights: "
            "`materialize_overlay` does so. To run another one beside the weights, rename "
            f"`{_RELEASE_ATTENTION}` to `.attn.` and `.lora_A.<name>.weight` to `.lora_A.weight` (`lora_B` likewise) "
            "in its keys, and load the dictionary with `prefix=None`."
        )


def check_adapter(transformer: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], prefix: str | None) -> None:
    """Refuse an adapter that would be loaded in part or not at all: PEFT itself only warns, or stops half way.

    Args:
        transformer (`torch.nn.Module`): The model it is for.
        shapes (`Mapping[str, tuple]`): The shape of every tensor of the adapter by name.
        prefix (`str`, *optional*): What the names of the tensors for this model begin with; others are left alone.

    Raises:
        ValueError: With everything that does not fit.
    """
    own = {name: tuple(shape) for name, shape in _without_prefix(shapes, prefix).items()}
    if not own:
        raise ValueError(
            f"This adapter holds nothing for {type(transformer).__name__}: no key begins with '{prefix}.'; found "
            f"{_some_of(shapes)}. If its keys are the model's own, load it with `prefix=None`."
        )
    modules = dict(transformer.named_modules())
    problems: dict[str, list[str]] = {}
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in own.items():
        match = _LORA_KEY.fullmatch(name)
        if match is not None:
            sides.setdefault(match["module"], {})[match["side"]] = shape
        elif not any(other in name for other in _OTHER_KEYS):
            problems.setdefault("tensors that are no part of a LoRA in Diffusers' layout", []).append(name)
    for name, pair in sides.items():
        kind = _misfit(modules, name, pair)
        if kind is not None:
            problems.setdefault(kind, []).append(name)
    if problems:
        found = "; ".join(f"{len(names)} {kind} ({_some_of(names)})" for kind, names in problems.items())
        raise ValueError(f"This adapter does not fit {type(transformer).__name__}, and was not loaded: {found}.")


def _without_prefix(values: Mapping[str, Any], prefix: str | None) -> dict[str, Any]:
    """Return those whose names begin with `prefix`, by the rest of their names."""
    start = "" if prefix is None else f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def _misfit(modules: dict[str, torch.nn.Module], name: str, pair: dict[str, tuple[int, ...]]) -> str | None:
    """Return what keeps a pair from being loaded, or None."""
    module = modules.get(name)
    if module is None:
        return "modules that it does not have"
    if len(pair) == 1:
        return "modules with one half of a pair"
    parent, _, child = name.rpartition(".")
    if child in _FUSABLE_PROJECTIONS and getattr(modules[parent], "fused_projections", False):
        return "projections that are fused and do not run: call `unfuse_qkv_projections` first"
    if not hasattr(module, "in_features"):
        return None
    rank = pair["A"][0]
    if pair["A"] != (rank, module.in_features) or pair["B"] != (module.out_features, rank):
        shapes = f"A {list(pair['A'])}, B {list(pair['B'])}, weight [{module.out_features}, {module.in_features}]"
        return (
            f"modules of another shape, as {shapes}: a LoRA of a pruned checkpoint (AdaLN input 8 instead of 2688) or "
            "of another model needs its own base"
        )
    return None


def refuse_fusing(transformer: torch.nn.Module) -> None:
    """Refuse to change the weights of LoRA layers where PEFT would fail half way or the change would be lost.

    Raises:
        ValueError: If the weights are quantised, or kept elsewhere by an offload.
    """
    order = "The order is: overlay, LoRA (`load_lora_weights`, `fuse_lora`), fp8, offload."
    weights = [layer.get_base_layer().weight for _, layer in _lora_layers(transformer)]
    stored = {type(weight.data).__name__ for weight in weights} - {"Tensor"}
    if stored:
        raise ValueError(
            f"LoRAs cannot be fused into quantised weights ({', '.join(sorted(stored))}). {order} Fuse into the "
            "unquantised transformer, save it, and load that with `quantization_config`; or leave them unfused."
        )
    if _is_group_offload_enabled(transformer) or any(weight.is_meta for weight in weights):
        raise ValueError(
            "LoRAs cannot be fused or unfused while the transformer is offloaded: the copies that the offload keeps "
            f"would not change. {order} Fuse before the offload is enabled; or leave them unfused."
        )


def refuse_fusing_twice(fused: list[dict[str, str]], merged: set[str], digests: Mapping[str, str]) -> None:
    """Refuse to add an adapter to weights that it is in already, under this name or another.

    Args:
        fused (`list[dict]`): The transformer's `fused_adapters`.
        merged (`set[str]`): The loaded adapters that are in the weights now.
        digests (`Mapping[str, str]`): The sha256 of the tensors of every adapter to be fused by its name.

    Raises:
        ValueError: With the way out.
    """
    known = {adapter["sha256"]: adapter["name"] for adapter in fused}
    for name, digest in digests.items():
        if name in merged:
            raise ValueError(
                f"The adapter {name!r} is fused already. Name the others in `adapter_names`, or call `unfuse_lora` to "
                "fuse it at another scale."
            )
        if digest in known:
            raise ValueError(
                f"The adapter {name!r} is the same as {known[digest]!r}: fused beside it, it would be applied twice. "
                "Name the others in `adapter_names`."
            )
        known[digest] = name


def merged_adapters(transformer: torch.nn.Module) -> set[str]:
    """Return the names of the loaded adapters that are in the weights now."""
    return {name for _, layer in _lora_layers(transformer) for name in layer.merged_adapters}


def active_adapters(transformer: torch.nn.Module) -> set[str]:
    """Return the names of the loaded adapters that act now."""
    return {name for _, layer in _lora_layers(transformer) for name in layer.active_adapters}


def refuse_unfused_projections(transformer: torch.nn.Module) -> None:
    """Refuse to fuse Q, K and V while LoRAs run beside them: the fused projection would leave them out.

    Raises:
        ValueError: With the way out.
    """
    for name, layer in _lora_layers(transformer):
        if name.rpartition(".")[2] in _FUSABLE_PROJECTIONS and not layer.merged:
            raise ValueError(
                f"Fused projections would leave out the LoRA on {name}: fuse it first with `fuse_lora`, or unload it."
            )


def _lora_layers(transformer: torch.nn.Module) -> "list[tuple[str, BaseTunerLayer]]":
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in transformer.named_modules() if isinstance(module, BaseTunerLayer)]


def _some_of(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
