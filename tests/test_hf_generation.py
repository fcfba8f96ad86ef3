"""The fused model against Hugging Face transformers: logits, and what generate() writes."""

import pytest
import torch

from minifused import GPT
from minifused.sampling import SamplingParams

transformers = pytest.importorskip("transformers")

# The widths are those of tests/test_model.py, which compiles their kernels already.
SHAPE = {"vocab_size": 256, "n_positions": 128, "n_embd": 40, "n_layer": 2, "n_head": 2}
VARIANTS = {
    "gpt2": {},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "untied, relu": {"activation_function": "relu", "n_inner": 48, "tie_word_embeddings": False},
}
PROMPTS = ["A", "Good morrow", "What, ho! the apothecary"]


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def pair(request, tmp_path_factory):
    """Our model and theirs, with the same random weights, through a folder that they saved."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **SHAPE, **request.param, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(folder)
    return GPT.from_pretrained(folder, device="cpu"), theirs


def test_logits(pair):
    ours, theirs = pair
    tokens = torch.randint(256, (2, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(ours.model(tokens), expected, rtol=0, atol=1e-4)


def test_64_greedy_tokens_alone_and_in_a_ragged_batch(pair):
    ours, theirs = pair
    greedy = {"max_new_tokens": 64, "params": SamplingParams(temperature=0)}
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([list(prompt.encode())])
        mask = torch.ones_like(ids)
        out = theirs.generate(ids, attention_mask=mask, max_new_tokens=64, do_sample=False)
        expected.append(out[0, ids.shape[1] :].tolist())
    assert [c.tokens for c in ours.generate(PROMPTS, **greedy)] == expected
    assert [ours.generate(prompt, **greedy)[0].tokens for prompt in PROMPTS] == expected
    assert len({token for tokens in expected for token in tokens}) > 3
