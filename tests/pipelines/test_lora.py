"""User LoRAs on `VDNH3Pipeline`: scales, several at once, fused and unfused, and what is refused in whole."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file


ATTENTION = "transformer_blocks.0.attn"
STOCK = [f"{ATTENTION}.to_q", f"{ATTENTION}.to_out.0", "transformer_blocks.1.ff.net.0.proj", "norm_out.linear"]
# Components that all tests of a worker use, so that none may hook them.
SHARED = ["text_encoder", "vae", "audio_vae"]
BRANCH = [f"{ATTENTION}.to_out_linear", f"{ATTENTION}.linear_attention.beta_proj", f"{ATTENTION}.softmax_gate.up"]


@pytest.fixture
def transformer(hybrid_transformer):
    """A transformer of the test's own."""
    return copy.deepcopy(hybrid_transformer)


@pytest.fixture
def pipe(make_pipeline, transformer):
    return make_pipeline(transformer=transformer)


@pytest.fixture
def make_lora(hybrid_transformer):
    """A function making a LoRA in Diffusers' layout; `ranks` may differ between modules."""

    def make(names, ranks=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for index, name in enumerate(names):
            rank = ranks if isinstance(ranks, int) else ranks[index]
            module = hybrid_transformer.get_submodule(name)
            low = 0.2 * torch.randn(rank, module.in_features, generator=generator)
            high = 0.2 * torch.randn(module.out_features, rank, generator=generator)
            tensors |= {f"transformer.{name}.lora_A.weight": low, f"transformer.{name}.lora_B.weight": high}
        return tensors

    return make


@pytest.fixture
def merged(make_pipeline, hybrid_transformer, generate):
    """A function returning the latents of weights with scaled LoRAs added: ``W + scale · B @ A``."""

    def make(*loras):
        transformer = copy.deepcopy(hybrid_transformer)
        weights = transformer.state_dict()
        for tensors, scales in loras:
            for name, low in tensors.items():
                if ".lora_A." in name:
                    module = name.removeprefix("transformer.").removesuffix(".lora_A.weight")
                    scale = scales[module] if isinstance(scales, dict) else scales
                    weights[f"{module}.weight"] += scale * tensors[name.replace("lora_A", "lora_B")] @ low
        transformer.load_state_dict(weights)
        return generate(make_pipeline(transformer=transformer))

    return make


def _assert_close(latents, expected):
    for one, two in zip(latents, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def _assert_equal(latents, expected):
    assert all(torch.equal(one, two) for one, two in zip(latents, expected, strict=True))


def _differ(latents, others):
    return (latents[0] - others[0]).abs().max() > 0.01


@pytest.mark.parametrize("names", [STOCK, BRANCH, STOCK + BRANCH], ids=["stock", "branch", "both"])
def test_a_lora_adds_its_product(names, pipe, make_lora, merged, generate):
    plain = generate(pipe)
    lora = make_lora(names)
    pipe.load_lora_weights(lora, adapter_name="mine")
    with_lora = generate(pipe)
    assert _differ(with_lora, plain)
    _assert_close(with_lora, merged((lora, 1.0)))
    pipe.unload_lora_weights()
    _assert_equal(generate(pipe), plain)


@pytest.mark.parametrize("ranks", [(2, 8), (8, 2)], ids=["low first", "high first"])
@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_ranks_that_differ_without_alphas_scale_each_module_by_one(ranks, reverse, pipe, make_lora, merged, generate):
    """Case 2, in every order of keys."""
    lora = make_lora(STOCK[:2], ranks)
    given = dict(reversed(lora.items())) if reverse else lora
    pipe.load_lora_weights(given)
    _assert_close(generate(pipe), merged((lora, 1.0)))


def test_alphas_scale_each_module(pipe, make_lora, merged, generate, tmp_path):
    """Alpha / rank per module: as tensors beside the weights, and as a number in the file's metadata."""
    lora = make_lora(STOCK[:2], (2, 8))
    expected = merged((lora, {STOCK[0]: 6 / 2, STOCK[1]: 4 / 8}))
    alphas = {f"transformer.{STOCK[0]}.alpha": torch.tensor(6.0), f"transformer.{STOCK[1]}.alpha": torch.tensor(4.0)}
    pipe.load_lora_weights({**lora, **alphas})
    _assert_close(generate(pipe), expected)
    pipe.unload_lora_weights()

    save_file(lora, tmp_path / "lora.safetensors", metadata={"alpha": "4"})
    pipe.load_lora_weights(str(tmp_path / "lora.safetensors"))
    _assert_close(generate(pipe), merged((lora, {STOCK[0]: 4 / 2, STOCK[1]: 4 / 8})))


def test_patterns_of_rank_and_alpha_survive_saving(make_pipeline, pipe, hybrid_transformer, generate, tmp_path):
    """What a trainer saves with `save_lora_weights`, metadata included, gives what it trained."""
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    trained = copy.deepcopy(hybrid_transformer)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["to_q", "beta_proj"],
        rank_pattern={"beta_proj": 2},
        alpha_pattern={"beta_proj": 12},
        init_lora_weights=False,
    )
    trained.add_adapter(config, "mine")
    expected = generate(make_pipeline(transformer=trained))
    metadata = trained.peft_config["mine"].to_dict()
    metadata["target_modules"] = sorted(metadata["target_modules"])
    type(pipe).save_lora_weights(
        tmp_path,
        transformer_lora_layers=get_peft_model_state_dict(trained, adapter_name="mine"),
        transformer_lora_adapter_metadata=metadata,
    )
    pipe.load_lora_weights(str(tmp_path))
    _assert_close(generate(pipe), expected)


def test_two_loras_with_weights(pipe, make_lora, merged, generate):
    first, second = make_lora(STOCK), make_lora([*STOCK[:1], *BRANCH], ranks=2, seed=1)
    pipe.load_lora_weights(first, adapter_name="first")
    pipe.load_lora_weights(second, adapter_name="second")
    pipe.set_adapters(["first", "second"], [0.5, 2.0])
    assert pipe.get_active_adapters() == ["first", "second"]
    both = generate(pipe)
    _assert_close(both, merged((first, 0.5), (second, 2.0)))
    pipe.set_adapters(["second"])
    _assert_close(generate(pipe), merged((second, 1.0)))
    pipe.set_adapters(["first", "second"], [0.5, 2.0])
    _assert_equal(generate(pipe), both)
    pipe.delete_adapters("second")
    pipe.set_adapters("first")
    _assert_close(generate(pipe), merged((first, 1.0)))


def test_fused_unfused_and_unloaded(pipe, make_lora, merged, generate):
    plain = generate(pipe)
    first, second = make_lora(STOCK), make_lora(BRANCH, seed=1)
    pipe.load_lora_weights(first, adapter_name="first")
    pipe.load_lora_weights(second, adapter_name="second")
    pipe.set_adapters(["first", "second"], [0.5, 2.0])
    beside = generate(pipe)
    pipe.fuse_lora()
    assert pipe.fused_loras == {"first", "second"}
    _assert_close(generate(pipe), beside)
    pipe.unfuse_lora()
    assert pipe.num_fused_loras == 0
    _assert_close(generate(pipe), beside)
    pipe.unload_lora_weights()
    _assert_close(generate(pipe), plain)

    pipe.load_lora_weights(first)
    pipe.fuse_lora(lora_scale=0.5)
    pipe.unload_lora_weights()
    assert not any("lora" in name for name, _ in pipe.transformer.named_parameters())
    _assert_close(generate(pipe), merged((first, 0.5)))


def test_the_scale_of_a_call(pipe, make_lora, merged, generate):
    lora = make_lora(STOCK)
    pipe.load_lora_weights(lora)
    _assert_close(generate(pipe, attention_kwargs={"scale": 0.5}), merged((lora, 0.5)))
    _assert_close(generate(pipe), merged((lora, 1.0)))


def test_the_stock_transformer_takes_them_too(make_pipeline, tiny_components, make_lora, generate):
    pipe = make_pipeline(transformer=copy.deepcopy(tiny_components["transformer"]))
    plain = generate(pipe)
    pipe.load_lora_weights(make_lora(STOCK))
    assert _differ(generate(pipe), plain)
    pipe.fuse_lora()
    pipe.unfuse_lora()
    pipe.unload_lora_weights()
    with pytest.raises(ValueError, match=r"does not fit MiniMaxH3Transformer3DModel.*to_out_linear"):
        pipe.load_lora_weights(make_lora(BRANCH))
    _assert_close(generate(pipe), plain)


def _renamed(lora, prefix):
    return {name.replace("transformer.", prefix, 1): tensor for name, tensor in lora.items()}


REFUSED = {
    "no prefix": (lambda lora: _renamed(lora, ""), r"no layout.*begin with `transformer\.`.*prefix=None"),
    "PEFT's own": (lambda lora: _renamed(lora, "base_model.model."), r"no layout.*base_model"),
    "a layer too many": (
        lambda lora: (
            lora | {f"transformer.transformer_blocks.7.attn.to_q.lora_{s}.weight": torch.ones(2, 2) for s in "AB"}
        ),
        r"does not fit.*transformer_blocks\.7\.attn\.to_q",
    ),
    "pruned": (
        lambda lora: {
            "transformer.norm_out.linear.lora_A.weight": torch.ones(4, 8),
            "transformer.norm_out.linear.lora_B.weight": torch.ones(4, 4),
        },
        r"pruned checkpoint.*norm_out\.linear",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("form", ["tensors", "file"])
def test_another_loras_are_refused_in_whole(change, message, form, pipe, make_lora, generate, tmp_path):
    plain = generate(pipe)
    source = change(make_lora(STOCK))
    if form == "file":
        save_file(source, tmp_path / "lora.safetensors")
        source = str(tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=message):
        pipe.load_lora_weights(source)
    assert pipe.get_list_adapters() == {}
    assert not any("lora" in name for name, _ in pipe.transformer.named_modules())
    _assert_equal(generate(pipe), plain)


def test_alphas_given_twice_are_refused(pipe, make_lora, tmp_path):
    lora = make_lora(STOCK[:1])
    metadata = json.dumps({"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.target_modules": ["to_q"]})
    save_file(
        {**lora, f"transformer.{STOCK[0]}.alpha": torch.tensor(2.0)},
        tmp_path / "lora.safetensors",
        metadata={"lora_adapter_metadata": metadata},
    )
    with pytest.raises(ValueError, match=r"metadata and as tensors"):
        pipe.load_lora_weights(str(tmp_path / "lora.safetensors"))


COMMUNITY = {
    "bare": ("", "lora_A", "lora_B"),
    "ai-toolkit": ("diffusion_model.", "lora_A", "lora_B"),
    "kohya": ("diffusion_model.", "lora_down", "lora_up"),
}


@pytest.mark.parametrize(("prefix", "down", "up"), COMMUNITY.values(), ids=COMMUNITY)
def test_loras_in_the_original_spelling_load(prefix, down, up, pipe, hybrid_transformer, merged, generate):
    """Fused Q, K and V, and the feed-forward halves swapped, as trained on the original checkpoint."""
    generator = torch.Generator().manual_seed(0)
    query, first = (
        hybrid_transformer.get_submodule(n) for n in (f"{ATTENTION}.to_q", "transformer_blocks.0.ff.net.0.proj")
    )

    def pair(module, outputs):
        low = 0.2 * torch.randn(4, module.in_features, generator=generator)
        return low, 0.2 * torch.randn(outputs, 4, generator=generator)

    qkv, fc1 = pair(query, 3 * query.out_features), pair(first, first.out_features)
    given = {}
    for name, (low, high) in {"attn.qkv_proj": qkv, "mlp.fc1": fc1}.items():
        given |= {f"{prefix}blocks.0.{name}.{down}.weight": low, f"{prefix}blocks.0.{name}.{up}.weight": high}
    pipe.load_lora_weights(given)
    expected = {}
    for name, high in zip(("to_q", "to_k", "to_v"), qkv[1].chunk(3), strict=True):
        expected[f"transformer.{ATTENTION}.{name}.lora_A.weight"] = qkv[0]
        expected[f"transformer.{ATTENTION}.{name}.lora_B.weight"] = high
    expected["transformer.transformer_blocks.0.ff.net.0.proj.lora_A.weight"] = fc1[0]
    expected["transformer.transformer_blocks.0.ff.net.0.proj.lora_B.weight"] = torch.cat(fc1[1].chunk(2)[::-1])
    _assert_close(generate(pipe), merged((expected, 1.0)))


def test_under_group_offload_they_load_and_are_not_fused(pipe, make_lora, merged, generate):
    lora = make_lora(STOCK + BRANCH)
    pipe.enable_group_offload(torch.device("cpu"), num_blocks_per_group=1, exclude_modules=SHARED)
    pipe.load_lora_weights(lora)
    _assert_close(generate(pipe), merged((lora, 1.0)))
    for action in (pipe.fuse_lora, pipe.unfuse_lora):
        with pytest.raises(ValueError, match="while the transformer is offloaded"):
            action()


def test_fused_before_the_offload(pipe, make_lora, merged, generate):
    lora = make_lora(STOCK + BRANCH)
    pipe.load_lora_weights(lora)
    pipe.fuse_lora()
    pipe.enable_group_offload(torch.device("cpu"), num_blocks_per_group=1, exclude_modules=SHARED)
    _assert_close(generate(pipe), merged((lora, 1.0)))


def test_a_fused_lora_cannot_be_applied_twice(pipe, make_pipeline, make_lora, merged, generate, tmp_path):
    """Not by this pipeline, nor by the one that is saved and loaded, in any form; and again once it is unfused."""
    lora = make_lora(STOCK)
    save_file(lora, tmp_path / "lora.safetensors", metadata={"note": "style"})
    file = str(tmp_path / "lora.safetensors")
    pipe.load_lora_weights(file, adapter_name="style")
    pipe.fuse_lora()
    assert [entry["name"] for entry in pipe.transformer.config.fused_adapters] == ["style"]
    with pytest.raises(ValueError, match=r"'style' is fused already"):
        pipe.fuse_lora()
    pipe.unfuse_lora()
    assert pipe.transformer.config.fused_adapters is None
    pipe.fuse_lora()
    pipe.unload_lora_weights()

    pipe.transformer.save_pretrained(tmp_path / "transformer")
    loaded = make_pipeline(transformer=type(pipe.transformer).from_pretrained(tmp_path / "transformer"))
    expected = merged((lora, 1.0))
    for one in (pipe, loaded):
        for source in (file, lora):
            with pytest.raises(ValueError, match=r"adapter 'style' is already merged.*twice"):
                one.load_lora_weights(source, adapter_name="again")
        assert one.get_list_adapters() == {}
        _assert_close(generate(one), expected)
        one.load_lora_weights(make_lora(STOCK, seed=1))


@pytest.mark.parametrize("prefix", ["", "diffusion_model."])
def test_pefts_default_name_in_the_original_spelling_is_not_an_overlays(prefix, pipe, make_lora):
    """The overlays' first adapter has the name that PEFT gives to every adapter."""
    pipe.transformer.register_to_config(fused_adapters=[{"name": "default", "sha256": "0" * 64}])
    outputs, inputs = pipe.transformer.get_submodule("transformer_blocks.0.ff.net.0.proj").weight.shape
    pipe.load_lora_weights(
        {
            f"{prefix}blocks.0.mlp.fc1.lora_A.default.weight": torch.ones(2, inputs),
            f"{prefix}blocks.0.mlp.fc1.lora_B.default.weight": torch.ones(outputs, 2),
        }
    )
    assert pipe.get_list_adapters() == {"transformer": ["default_0"]}
    named = {name.replace(".weight", ".default.weight"): tensor for name, tensor in make_lora(STOCK).items()}
    with pytest.raises(
        ValueError, match=r"'default' is already merged.*If it is another.*`\.lora_A\.default\.weight`"
    ):
        pipe.load_lora_weights(named)
