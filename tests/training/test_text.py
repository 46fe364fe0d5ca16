import pytest
import torch

from diffusers_h3.demo.grammar import all_prompts
from training import data, text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, device):
    return text.PromptEncoder(tmp_path_factory.mktemp("run"), device)


def test_every_word_of_the_grammar_is_one_token(encoder):
    for sentence in all_prompts():
        assert len(encoder.tokenizer(sentence, add_special_tokens=False)["input_ids"]) == len(sentence.split())


def test_other_text_keeps_its_bytes(encoder):
    ids = encoder.tokenizer("Größe 7!", add_special_tokens=False)["input_ids"]
    assert encoder.tokenizer.decode(ids) == "Größe 7!"


def test_a_batch_of_prompts_is_what_diffusers_encodes_one_by_one(encoder):
    from diffusers.modular_pipelines.minimax_h3.encoders import get_qwen3vl_prompt_embeds

    prompts = ["a red circle moves left to right", "a cyan square rises to the top on a light background"]
    prompts.append("a blue circle moves right to left")
    for prompt, rows in zip(prompts, encoder(prompts), strict=True):
        ids = encoder.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        expected = get_qwen3vl_prompt_embeds(encoder.encoder, encoder.processor, ids)
        torch.testing.assert_close(rows, expected[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attribute", ["colour", "shape", "motion"])
def test_a_linear_probe_reads_held_out_prompts(encoder, attribute):
    """Least squares on the mean text row, fitted on the training prompts, names what held-out prompts say."""

    def features(scenes):
        rows = torch.stack([rows.mean(0) for rows in encoder(data.prompts(scenes, seed=0))])
        return torch.cat((rows, torch.ones(len(rows), 1)), dim=1).double()

    train, test = data.draw_scenes(500, seed=0), data.draw_scenes(200, seed=1, held_out=True)
    targets = torch.nn.functional.one_hot(getattr(train, attribute)).double()
    probe = torch.linalg.lstsq(features(train), targets).solution
    accuracy = ((features(test) @ probe).argmax(1) == getattr(test, attribute)).double().mean()
    assert accuracy >= 0.99


def test_word_order_is_kept(encoder):
    right, left = encoder(["a red circle moves left to right", "a red circle moves right to left"])
    # The same words: what tells the sentences apart is where each row stands and what it has seen before.
    swapped = left[[0, 1, 2, 3, 6, 5, 4]]
    assert (right - swapped).norm() > 0.02 * right.norm()
    assert (right.mean(0) - left.mean(0)).norm() > 0.02 * right.mean(0).norm()
