"""The text side: a tokenizer of the grammar's words, and an untrained Qwen3-VL that keeps them apart.

The encoder is not trained. Its token embeddings are unit normal and its layers add a tenth of what a fresh layer
would, so the state after 50 layers still holds every word, stirred with what stands before it. The transformer learns
to read that, as it would read a pretrained encoder.
"""

import json
from collections import defaultdict
from pathlib import Path

import torch
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import Qwen2TokenizerFast, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from diffusers_h3.demo.grammar import all_prompts

from .qwen import make_processor, make_text_encoder, make_tokenizer


_LAYER_SCALE = 0.1


def make_word_tokenizer() -> Qwen2TokenizerFast:
    """Build a byte-level tokenizer with the merges of the grammar's words; any other text still has its bytes."""
    plain = make_tokenizer()
    special = sorted(plain.get_added_vocab().items(), key=lambda item: item[1])
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    # Far more merges than there are: training ends when every word is one token.
    trainer = BpeTrainer(vocab_size=4096, initial_alphabet=sorted(ByteLevel.alphabet()), show_progress=False)
    learner.train_from_iterator(all_prompts(), trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Qwen2TokenizerFast(vocab=model["vocab"], merges=merges, model_max_length=plain.model_max_length)
    tokenizer.add_tokens([plain.added_tokens_decoder[index] for _, index in special])
    return tokenizer


def make_calm_text_encoder(tokenizer: Qwen2TokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """Build the untrained encoder, bfloat16, whose state 50 keeps the words apart."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        encoder = make_text_encoder(tokenizer)
        language_model = encoder.model.language_model
        torch.nn.init.normal_(language_model.embed_tokens.weight)
        with torch.no_grad():
            for layer in language_model.layers:
                layer.self_attn.o_proj.weight.mul_(_LAYER_SCALE)
                layer.mlp.down_proj.weight.mul_(_LAYER_SCALE)
    return encoder


def prepare_text(run: Path, seed: int = 0) -> None:
    """Write tokenizer, processor and encoder below `run / "text"`, once."""
    folder = run / "text"
    if (folder / "text_encoder" / "config.json").is_file():
        return
    tokenizer = make_word_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    make_processor(tokenizer).save_pretrained(folder / "processor")
    make_calm_text_encoder(tokenizer, seed).save_pretrained(folder / "text_encoder")


class PromptEncoder:
    """Encode prompts as the pipeline does.

    Args:
        run (`Path`): The run, whose text side is prepared where it is missing.
        device (`torch.device`): Where the encoder runs, in float32.
    """

    def __init__(self, run: Path, device: torch.device):
        prepare_text(run)
        folder = run / "text"
        self.tokenizer = Qwen2TokenizerFast.from_pretrained(folder / "tokenizer")
        self.processor = Qwen3VLProcessor.from_pretrained(folder / "processor")
        encoder = Qwen3VLForConditionalGeneration.from_pretrained(folder / "text_encoder", dtype=torch.float32)
        self.encoder = encoder.eval().to(device)
        self.layer = MiniMaxH3ModularPipeline().text_encoder_layer
        self.device = device

    @property
    def text_dim(self) -> int:
        """Channels of a text row."""
        return self.encoder.config.text_config.hidden_size

    @torch.no_grad()
    def __call__(self, prompts: list[str]) -> list[torch.Tensor]:
        """Return the text rows of every prompt, ``[tokens, text_dim]``; prompts of one length run as one batch."""
        ids = {prompt: self.tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts}
        groups = defaultdict(list)
        for prompt, tokens in ids.items():
            groups[len(tokens)].append(prompt)
        rows = {}
        for group in groups.values():
            tokens = torch.tensor([ids[prompt] for prompt in group], device=self.device)
            # The arguments of diffusers' own call, which takes one prompt at a time.
            output = self.encoder.model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                mm_token_type_ids=torch.zeros_like(tokens),
                use_cache=False,
                output_hidden_states=True,
            )
            rows.update(zip(group, output.hidden_states[self.layer], strict=True))
        return [rows[prompt] for prompt in prompts]
