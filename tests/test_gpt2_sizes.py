"""GPT-2's own sizes on a GPU: 16-bit logits, loading and generating, text in any batch."""

import json

import pytest
import torch
from helpers import needs_cuda

from minifused import GPT, checkpoint
from minifused.config import PRESETS
from minifused.engine import DEMO_FOLDER
from minifused.metrics import BOUNDS, measure, within
from minifused.model import GPTModel
from minifused.sampling import SamplingParams
from minifused.twin import Twin

PROMPTS = ["R", "First Citizen:\nWe are", "O, she doth teach", "JULIET:\nAy me! " * 5]


def random_twin(name):
    """A float32 twin on the GPU, whose norms and biases are random too, and large enough to see."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        twin = Twin(PRESETS[name]).eval().requires_grad_(False)
    for parameter in twin.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return twin


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl"])
@torch.inference_mode()
def test_logits_are_as_close_to_float32_as_eager(name, dtype):
    twin = random_twin(name)
    tokens = torch.randint(50257, (2, 300), generator=torch.Generator().manual_seed(1)).cuda()
    reference = twin(tokens).double()
    fused = GPTModel.from_weights(PRESETS[name], twin.state_dict(), "cuda", dtype)
    errors = measure(fused(tokens), reference)
    cached = measure(through_a_cache(fused, tokens), reference[:, 290:])
    eager = measure(twin.to(dtype)(tokens), reference)
    limits = BOUNDS["model"].limits(eager)
    assert within(errors, limits), f"{errors}, allowed {limits}, eager PyTorch {eager}"
    assert within(cached, limits), f"{cached}, allowed {limits}, eager PyTorch {eager}"


def through_a_cache(model, tokens):
    """Logits of the last ten positions, each by a step of its own."""
    cache = model.new_cache(2, 300)
    model(tokens[:, :290], cache, last_only=True)
    return torch.cat([model(tokens[:, i : i + 1], cache) for i in range(290, 300)], dim=1)


def save_vocabulary(folder, size):
    """A tokenizer of single bytes, filled up with words that no text has."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [n for n in range(256) if n not in printable]
    letters = [chr(n) for n in printable] + [chr(256 + i) for i in range(len(others))]
    words = [*letters, *(f"<{n}>" for n in range(256, size - 1)), "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: n for n, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")


@needs_cuda
def test_gpt2_xl_loads_and_generates(tmp_path):
    pytest.importorskip("tokenizers")
    config = PRESETS["gpt2-xl"]
    weights = random_twin("gpt2-xl").bfloat16().state_dict()
    checkpoint.save(tmp_path, config, weights)
    save_vocabulary(tmp_path, config.vocab_size)
    xl = GPT.from_pretrained(tmp_path, device="cuda", dtype="bfloat16")
    assert all(
        torch.equal(p[: len(weights[n])], weights[n]) for n, p in xl.model.named_parameters()
    )
    options = {"max_new_tokens": 24, "params": SamplingParams(top_k=50), "ignore_eos": True}
    together = xl.generate(["To be", "or not to be, that is"], with_logprobs=True, **options)
    for completion in together:
        assert len(completion.tokens) == 24 and completion.finish_reason == "length"
        assert all(-15 < score < 0 for score in completion.logprobs)
    assert together[0].tokens != together[1].tokens
    assert xl.generate("To be", **options)[0].tokens == xl.generate("To be", **options)[0].tokens


@needs_cuda
@pytest.mark.parametrize("params", [SamplingParams(0), SamplingParams(0.9, seed=3, top_p=0.9)])
def test_float32_text_does_not_depend_on_the_batch(params):
    demo = GPT.from_pretrained(DEMO_FOLDER, device="cuda", dtype="float32")
    options = {"max_new_tokens": 64, "params": params}
    together = demo.generate(PROMPTS, num_samples=6, **options)  # 24 rows: another kernel than 1
    for i, prompt in enumerate(PROMPTS):
        alone = demo.generate(prompt, **options)
        assert alone[0].tokens == together[6 * i].tokens
