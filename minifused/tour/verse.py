"""The model on all of these kernels: a line of verse, and the parity of its logits."""

from collections.abc import Iterator

from minifused import parity
from minifused.engine import GPT
from minifused.model import MLP
from minifused.model import Block as ModelBlock
from minifused.sampling import SamplingParams
from minifused.timing import Timing, timed
from minifused.tour.blocks import Block, Figure, Section, Table, Verse
from minifused.tour.source import function
from minifused.tour.stage import Stage

PROMPT = "ROMEO:\n"
NEW_TOKENS = 96


def run_model(stage: Stage) -> Iterator[Block | Figure]:
    yield function("a layer, minifused/model.py", ModelBlock.forward)
    yield function("its MLP, minifused/model.py", MLP.forward)
    model = GPT.from_pretrained(device=stage.device.type)
    text, timing = "", Timing()
    choice = SamplingParams(temperature=0.7)
    events = model.stream([model.encode(PROMPT)], NEW_TOKENS, choice, stop=["\n"])
    for event in timed(events, timing):
        text += event.text
    yield Verse(PROMPT + text)
    yield from compare_logits(stage)
    yield Figure("tokens", timing.tokens)
    yield Figure("per token", timing.ms_per_token, "ms")


def compare_logits(stage: Stage) -> Iterator[Block | Figure]:
    """The model and its twin on the same tokens; raises RuntimeError if one is past its bound."""
    results = list(parity.run(stage.device, [stage.dtype], checks=("forward",)))
    rows = tuple(
        (
            f"{r.check} {r.case}",
            *(f"{x:.1e}" for x in (r.max_error, r.rms_error, r.eager_rms_error, r.bound)),
            "ok" if r.ok else f"FAIL {r.note}",
        )
        for r in results
    )
    heads = ("", "max error", "RMS error", "eager's", "allowed", "")
    yield Table(f"Against the twin in float64, {results[0].dtype}", heads, rows)
    logits = next(r for r in results if r.check == "logits")
    yield Figure("logits error", logits.rms_error, f"(allowed {logits.bound:.1e})")
    if not all(r.ok for r in results):
        raise RuntimeError("past the bound: " + ", ".join(r.case for r in results if not r.ok))


MODEL = Section(
    "model",
    "The model",
    "All of it together: the demo model writes a line through GPT.stream, its prompt by "
    "FlashAttention and the tiled product, each token behind it by the decode kernels and a KV "
    "cache. The same weights in plain PyTorch, in float64, say how far the residual stream of each "
    "layer and the logits are off; PyTorch in the same dtype says how far is usual.",
    run_model,
)
