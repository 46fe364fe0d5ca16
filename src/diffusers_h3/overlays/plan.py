"""Check that base, adapters and linear branch belong together, from headers and configs alone, before any download."""

from dataclasses import dataclass
from typing import Any

from ..hybrid.config import HybridAttentionConfig
from .adapters import Pair, pair_tensors, read_adapter_spec
from .errors import IncompatibleWeightsError, IntegrityError, ManifestError, SourceError, some_of
from .manifest import OverlayManifest, WeightsFile
from .sources import Folder, read_folder_json
from .tensor_file import TensorEntry


BASE_CLASS = "MiniMaxH3Transformer3DModel"
INDEX_FILE = "diffusion_pytorch_model.safetensors.index.json"
SINGLE_FILE = "diffusion_pytorch_model.safetensors"

_SHORT_CONV_TAPS = 5


@dataclass(frozen=True)
class Merge:
    """One pair of one adapter: `adapter` is its position in the manifest."""

    adapter: int
    pair: Pair


@dataclass(frozen=True)
class TransformerPlan:
    """What the materialised transformer is made of.

    `shards` maps each file of the base to its header, `merges` each changed weight to its merges in order.
    """

    config: dict[str, Any]
    shards: dict[str, dict[str, TensorEntry]]
    merges: dict[str, list[Merge]]
    branch: dict[str, TensorEntry]

    def is_changed(self, shard: str) -> bool:
        """Whether any weight of a shard is merged into; the others are linked as they are."""
        return any(name in self.merges for name in self.shards[shard])


def plan_transformer(
    manifest: OverlayManifest, base: Folder, adapters: list[Folder], branch: Folder
) -> TransformerPlan:
    """Read the headers and check every name, shape, rank and count against each other and the manifest.

    Raises:
        IncompatibleWeightsError: If the parts do not belong together, or the base already is an overlay's result.
        ManifestError: If the manifest says otherwise than the files.
        SourceError: If a file is missing.
    """
    config = read_folder_json(base, ("config.json",))
    _check_base_config(config, base, manifest.hybrid_attention)
    shards = _read_shards(base)
    _check_count("base_transformer.shards", manifest.base_transformer.shards, len(shards), base.location)
    tensors = {name: entry for header in shards.values() for name, entry in header.items()}

    merges: dict[str, list[Merge]] = {}
    for position, (adapter, folder) in enumerate(zip(manifest.adapters, adapters, strict=True)):
        spec = read_adapter_spec(folder)
        header = _weights_header(folder, adapter.weights, f"adapters[{position}]")
        pairs = pair_tensors(adapter.name, folder.location, spec, header, tensors)
        _check_count(f"adapters[{position}].pairs", adapter.pairs, len(pairs), folder.location)
        for pair in pairs:
            merges.setdefault(pair.target, []).append(Merge(position, pair))

    branch_header = _weights_header(branch, manifest.linear_branch.weights, "linear_branch")
    _check_branch(branch, branch_header, config, manifest.hybrid_attention)
    clashes = sorted(set(branch_header) & set(tensors))
    if clashes:
        raise IncompatibleWeightsError(f"{base.location} already has weights of a linear branch: {some_of(clashes)}.")
    return TransformerPlan(config, shards, merges, branch_header)


def branch_shapes(config: dict[str, Any], hybrid_attention: HybridAttentionConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor a linear branch holds for a base with this `config`."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = hybrid_attention.linear_head_dim
    inner = heads * head_dim
    layer = {
        "linear_attention.alpha.A_log": (heads,),
        "linear_attention.alpha.dt_bias": (inner,),
        "linear_attention.alpha.down.weight": (head_dim, hidden),
        "linear_attention.alpha.up.weight": (inner, head_dim),
        "linear_attention.beta_proj.weight": (heads, hidden),
        "linear_attention.norm.weight": (head_dim,),
        "linear_attention.output_gate.down.weight": (head_dim, hidden),
        "linear_attention.output_gate.up.weight": (inner, head_dim),
        "linear_attention.output_gate.up.bias": (inner,),
        "to_out_linear.weight": (hidden, inner),
    }
    for target in hybrid_attention.short_conv_targets:
        layer[f"linear_attention.short_conv.{target}_sp.weight"] = (inner, 1, _SHORT_CONV_TAPS, _SHORT_CONV_TAPS)
        layer[f"linear_attention.short_conv.{target}_tm.weight"] = (inner, 1, _SHORT_CONV_TAPS)
    if hybrid_attention.enable_softmax_gate:
        layer["softmax_gate.up.weight"] = (heads, hidden)
        layer["softmax_gate.up.bias"] = (heads,)
    return {
        f"transformer_blocks.{block}.attn.{name}": shape
        for block in range(config["num_layers"])
        for name, shape in layer.items()
    }


def _check_base_config(config: dict[str, Any], base: Folder, hybrid_attention: HybridAttentionConfig) -> None:
    if config.get("fused_adapters") or config.get("hybrid_attention"):
        names = [entry.get("name") for entry in config.get("fused_adapters") or []]
        raise IncompatibleWeightsError(
            f"{base.location} already holds an overlay (fused adapters: {some_of(names) or 'none'}). "
            "Merging twice would ruin it: load it as it is, or name the stock base."
        )
    if config.get("_class_name") != BASE_CLASS:
        raise IncompatibleWeightsError(
            f"{base.location} holds a {config.get('_class_name')!r}; an overlay is laid over a {BASE_CLASS}."
        )
    for name in ("num_attention_heads", "attention_head_dim", "hidden_size", "num_layers"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise IncompatibleWeightsError(f"{base.location}/config.json: `{name}` must be a positive integer.")
    if config["attention_head_dim"] != hybrid_attention.linear_head_dim:
        raise IncompatibleWeightsError(
            f"The linear branch has {hybrid_attention.linear_head_dim} channels per head (`linear_head_dim`), "
            f"{base.location} has {config['attention_head_dim']}; they must be equal."
        )


def _read_shards(base: Folder) -> dict[str, dict[str, TensorEntry]]:
    """Return the header of every file of the base and check them against the index."""
    files = base.files()
    if INDEX_FILE not in files:
        if SINGLE_FILE not in files:
            raise SourceError(
                f"Looked for {INDEX_FILE} or {SINGLE_FILE} in {base.location}; found {some_of(sorted(files), 8)}."
            )
        return {SINGLE_FILE: base.header(SINGLE_FILE)}
    index = read_folder_json(base, (INDEX_FILE,)).get("weight_map")
    names = list(index.values()) if isinstance(index, dict) else []
    if not names or not all(
        isinstance(name, str) and name.endswith(".safetensors") and "/" not in name for name in names
    ):
        raise ManifestError(f"{base.location}/{INDEX_FILE} must map every weight to a .safetensors file beside it.")
    missing = sorted(set(names) - set(files))
    if missing:
        raise SourceError(f"{base.location} lacks {some_of(missing)}, which its index names.")
    shards = {name: base.header(name) for name in sorted(set(names))}
    stored = {(tensor, shard) for shard, header in shards.items() for tensor in header}
    differences = sorted(tensor for tensor, _ in stored ^ set(index.items()))
    if differences:
        raise IntegrityError(f"{base.location}: index and shards disagree about {some_of(differences)}.")
    return shards


def _weights_header(folder: Folder, weights: WeightsFile, path: str) -> dict[str, TensorEntry]:
    """Return the header of a weights file after checking that it is there and as large as published."""
    files = folder.files()
    if weights.file not in files:
        raise SourceError(f"Looked for {weights.file} in {folder.location}; found {some_of(files, 8) or 'no files'}.")
    if weights.bytes is not None and files[weights.file] != weights.bytes:
        raise IntegrityError(
            f"{folder.location}/{weights.file} holds {files[weights.file]:,} bytes, the manifest "
            f"(`{path}.weights.bytes`) says {weights.bytes:,}. It is damaged or of another version: fetch it again."
        )
    header = folder.header(weights.file)
    _check_count(f"{path}.weights.tensors", weights.tensors, len(header), f"{folder.location}/{weights.file}")
    return header


def _check_count(path: str, expected: int | None, found: int, location: str) -> None:
    if expected is not None and expected != found:
        raise ManifestError(f"The manifest's `{path}` is {expected}, {location} has {found}.")


def _check_branch(
    folder: Folder, header: dict[str, TensorEntry], config: dict[str, Any], hybrid_attention: HybridAttentionConfig
) -> None:
    if "config.json" in folder.files():
        content = read_folder_json(folder, ("config.json",))
        try:
            own = HybridAttentionConfig.from_dict(content)
        except ValueError as error:
            raise ManifestError(f"{folder.location}/config.json: {error}") from error
        if own != hybrid_attention:
            raise ManifestError(
                f"{folder.location}/config.json describes another hybrid attention than the manifest: "
                f"{own.to_dict()['config']} instead of {hybrid_attention.to_dict()['config']}."
            )
    expected = branch_shapes(config, hybrid_attention)
    problems = {
        "missing": sorted(set(expected) - set(header)),
        "unexpected": sorted(set(header) - set(expected)),
        "of another shape": [
            f"{name}: {list(header[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in header and header[name].shape != shape
        ],
    }
    found = "; ".join(f"{len(names)} {kind} ({some_of(names)})" for kind, names in problems.items() if names)
    if found:
        raise IncompatibleWeightsError(
            f"The linear branch {folder.location} does not fit the base transformer: {found}."
        )
