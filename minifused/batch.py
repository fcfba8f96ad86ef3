"""Rows that decode together: all their state, on the device, at addresses that never change.

A step reads and writes tensors alone, its own position and the end of each row included, so that
one CUDA graph holds it for good: embedding, layers, head, softmax, draw, and the count of what is
left. The host reads token ids, chunks of them behind the device, and stops a row late rather than
let the device wait.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from minifused import ops
from minifused.cache import KVCache
from minifused.model import GPTModel
from minifused.sampling import (
    SamplingParams,
    finite_rows,
    logprobs,
    mark_seen,
    philox_uniform,
    sample,
    scores_to_draw,
)
from minifused.twin import Twin

CHUNK = 16  # steps of a CUDA graph whose tokens travel to the host together
PREFILL_MULTIPLE = 64  # what prompts are padded to on a GPU, so that few lengths are captured
_compiled: WeakKeyDictionary[GPTModel, set[Hashable]] = WeakKeyDictionary()  # by `_compile_ahead`


@dataclass(frozen=True)
class Choice:
    """What of a request is part of a captured step: how tokens are chosen, and which ends a row."""

    params: SamplingParams  # but for the seed, which only the random numbers know
    eos: int | None = None
    with_logprobs: bool = False


@dataclass(frozen=True)
class Step:
    """What the host learns of a step: a value for each row."""

    tokens: list[int]
    finite: list[bool]
    logprobs: list[float] | None


class Batch:
    """`size` rows of up to `capacity` positions; rows without a prompt stand still.

    Args:
        softmax: over the last dimension, of what is drawn from.
        vocab_size: how many of the model's tokens may be chosen, the first ones.
        graph: replay CUDA graphs of what is done again, rather than launch each kernel.
    """

    def __init__(
        self,
        model: GPTModel | Twin,
        softmax: Callable[[Tensor], Tensor],
        vocab_size: int,
        device: torch.device,
        size: int,
        capacity: int,
        choice: Choice,
        graph: bool = False,
    ):
        self.model, self.softmax, self.vocab_size, self.choice = model, softmax, vocab_size, choice
        self.device, self.size, self.capacity = device, size, capacity
        self.cache = model.new_cache(size, capacity)
        new = self._zeros
        self.prompt = new(torch.int64, size, capacity)
        self.request = new(torch.int64, 4, size)  # what `begin` is told: see `_accept`
        self._staging = Staging(self.prompt, self.request)
        self.lengths = new(torch.int32, size)  # of the prompts
        self.tokens = new(torch.int64, size, 1)  # the next ones to read
        self.going = new(torch.int32, size)  # 1 where a row goes on, otherwise 0
        self.left = new(torch.int32, size)  # tokens that a row may still get
        self.step_index = new(torch.int64, size)  # the same of all rows
        self.seed = new(torch.int64, 1)
        self.samples = new(torch.int64, size)  # the rows' random streams
        # By step: random numbers, unless the last kernel makes them, and what the host will read.
        self.uniforms = new(torch.float32, capacity, size)
        self.chosen = new(torch.int64, capacity, size)
        self.finite = new(torch.bool, capacity, size)
        self.scores = new(torch.float32, capacity, size) if choice.with_logprobs else None
        penalised = choice.params.repetition_penalty != 1.0
        self.seen = new(torch.bool, size, vocab_size) if penalised else None
        self.longest = 1  # of the prompts' lengths
        self.most = 0  # tokens that a row may get
        padded = device.type == "cuda" and isinstance(model, GPTModel)  # the twin takes no padding
        self._multiple = PREFILL_MULTIPLE if padded else 1
        self._graphs = Graphs() if graph else None
        self.fused = padded  # the end of a step in one kernel, or as operators of PyTorch

    def begin(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        samples: Sequence[int],
        steps: Sequence[int],
        seed: int = 0,
    ) -> None:
        """Take prompts of at least a token, `size` of them or fewer, in place of what was there.

        Args:
            prompts: token ids; or a tensor of them, (B, T) int64 on the device.
            samples: the number of each row's random stream.
            steps: how many tokens each row may get.
        """
        lengths = [len(prompt) for prompt in prompts]
        self.longest, self.most = max(lengths), max(steps)
        rows = (lengths, steps, samples, [seed] * len(lengths))
        self._staging.send(prompts, rows)

    def run(self, count: int) -> Iterator[Step]:
        """Prefill, then decode, `count` steps in all; the caller may `stop` rows, or break off."""
        chunk, depth = (1, 1) if self._graphs is None else (CHUNK, 2)
        ahead: list[Chunk] = []  # on their way, while the device works on the next one
        launched = 0
        while launched < count or ahead:
            room = depth if launched > 1 else 1  # the first token waits for no other
            if launched < count and len(ahead) < room:
                end = min(count, launched + chunk) if launched else 1
                for index in range(launched, end):
                    self.step() if index else self.prefill()
                ahead.append(Chunk(self, launched, end))
                launched = end
            else:
                yield from ahead.pop(0).steps()

    def stop(self, going: Sequence[bool]) -> None:
        """Let those rows stand still that do not go on."""
        rows = [*going, *[False] * (self.size - len(going))]
        self.left.mul_(torch.tensor(rows, dtype=torch.int32).to(self.device, non_blocking=True))
        self.going.mul_(self.left.clamp(max=1))

    def prefill(self) -> Tensor:
        """Run the prompts, and choose the first token of each row.

        Returns:
            The logits it was chosen from, (size, vocab_size) float32, until the next call.
        """
        length = min(-(-self.longest // self._multiple) * self._multiple, self.capacity)
        self._compile_ahead(length, self.most > 1)
        if self._graphs is None:
            return self._prefill(length)
        return self._graphs.launch(("prefill", length), lambda: self._prefill(length))

    def step(self) -> Tensor:
        """Run the tokens chosen last, and choose the next ones; returns logits as `prefill`."""
        return self._step() if self._graphs is None else self._graphs.launch("step", self._step)

    def _compile_ahead(self, length: int, steps: bool) -> None:
        """Compile what a prefill launches, and a step if there are `steps`, but only once.

        Both are done without launches, on garbage; the real prefill and `_accept` reset what they
        leave. A step needs room, which there is for a row that may get two tokens.
        """
        if not isinstance(self.model, GPTModel):
            return
        # Kernels go by ranges of lengths, most up to a power of 2. One that this misses is compiled
        # when it is launched.
        ranges = (length - 1).bit_length(), (self.capacity - 1).bit_length()
        work = self.size, ranges, steps, self.choice
        done = _compiled.setdefault(self.model, set())
        if work in done:
            return
        ops.compile_ahead(lambda: (self._prefill(length), steps and self._step()))
        done.add(work)
        for table in (self.finite, self.scores):
            if table is not None:
                table[-1].zero_()  # no step was counted: `_note` took this one for the last

    def _accept(self, length: int) -> None:
        """Take over what `begin` was told, on the device: a prefill's graph holds this too."""
        self.lengths.copy_(self.request[0])
        self.left.copy_(self.request[1])
        self.samples.copy_(self.request[2])
        self.seed.copy_(self.request[3, :1])
        torch.clamp(self.lengths, max=1, out=self.going)
        if not self.fused:
            positions = self.lengths + torch.arange(self.most, device=self.device)[:, None]
            self.uniforms[: self.most] = philox_uniform(self.seed, self.samples, positions)
        self.step_index.zero_()
        self.cache.reset()
        if self.seen is not None:
            self.seen.zero_()
            mark_seen(self.seen, self.prompt[:, :length], self.lengths)

    def _prefill(self, length: int) -> Tensor:
        self._accept(length)
        scores, peaks = self._forward(self.prompt[:, :length], self.lengths, advance=True)
        return self._choose_fused(scores, peaks, None) if self.fused else self._choose(scores)

    def _step(self) -> Tensor:
        cache = self.cache
        if isinstance(cache, KVCache):
            cache.longest = 0  # only the device knows it, and keeps rows within the cache
        scores, peaks = self._forward(self.tokens, self.going, advance=not self.fused)
        if self.fused and isinstance(cache, KVCache):
            return self._choose_fused(scores, peaks, cache.lengths)
        return self._choose(scores)

    def _forward(
        self, tokens: Tensor, counts: Tensor, advance: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Scores (size, V), or more columns, of each row's next token, and their peaks."""
        if isinstance(self.model, GPTModel) and isinstance(self.cache, KVCache):
            return self.model.last_scores(tokens, self.cache, counts, self.vocab_size, advance)
        scores = self.model(tokens, self.cache, last_only=True)  # of one length, all going
        return scores[:, -1], None

    def _choose_fused(self, scores: Tensor, peaks: Tensor | None, lengths: Tensor | None) -> Tensor:
        """As `_choose`, in one kernel behind what the choice asks for.

        It also counts the position that rows got in the cache, if given its lengths.
        """
        logits, params, masses = scores[:, : self.vocab_size], self.choice.params, None
        if not params.is_plain:
            weights, peaks = scores_to_draw(logits, params, self.softmax, self.seen), None
        elif params.is_greedy:
            weights = scores
        else:
            weights, masses = ops.softmax_to_draw(scores, self.vocab_size, peaks)
        random = None if params.is_greedy else (self.seed, self.samples, self.lengths)
        eos = -1 if self.choice.eos is None else self.choice.eos
        ops.choose_token(
            weights, self.vocab_size, random, eos, self.step_index, self.chosen, self.finite,
            self.tokens.view(-1), self.left, self.going, lengths, masses, peaks,
        )  # fmt: skip
        if not params.is_plain:  # a filter may drop what is not finite
            self._note(self.finite, finite_rows(logits))
        if self.scores is not None:
            self._note(self.scores, logprobs(logits, self.tokens[:, 0]))
        if self.seen is not None:
            mark_seen(self.seen, self.tokens)
        return logits

    def _note(self, table: Tensor, row: Tensor) -> None:
        """Write what belongs to the step that has just been counted.

        None was where nothing is launched: `index_put_` takes the index -1 too.
        """
        table.index_put_((self.step_index[:1] - 1,), row[None])

    def _choose(self, scores: Tensor) -> Tensor:
        """Draw a token of each row by its scores, and note all that a step leaves.

        Returns the logits (size, vocab_size).
        """
        logits = scores[:, : self.vocab_size]
        at, params = self.step_index[:1], self.choice.params
        uniforms = self.uniforms.index_select(0, at).squeeze(0)
        chosen = sample(logits, params, uniforms, self.softmax, self.seen)  # (size,)
        self.chosen.index_copy_(0, at, chosen[None])
        self.finite.index_copy_(0, at, finite_rows(logits)[None])
        if self.scores is not None:
            self.scores.index_copy_(0, at, logprobs(logits, chosen)[None])
        if self.seen is not None:
            mark_seen(self.seen, chosen[:, None])
        self.tokens.copy_(chosen[:, None])
        self.left.sub_(self.going)
        self.going.mul_(self.left.clamp(max=1))
        if self.choice.eos is not None:
            self.going.mul_(chosen != self.choice.eos)
        self.step_index.add_(1)
        return logits

    def _zeros(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)


class Staging:
    """Where the host leaves a request, page-locked: its copy to a GPU keeps nobody waiting."""

    def __init__(self, prompt: Tensor, request: Tensor):
        self._targets = prompt, request
        self._sources = tuple(
            torch.zeros(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in self._targets
        )
        self._sent = torch.cuda.Event() if prompt.is_cuda else None

    def send(
        self, prompts: Sequence[Sequence[int]] | Tensor, rows: Sequence[Sequence[int]]
    ) -> None:
        """Copy prompts, or take them from the device, and `rows` (4, up to size) of the request."""
        (prompt, request), (prompt_here, request_here) = self._targets, self._sources
        if self._sent is not None:
            self._sent.synchronize()  # the last request may still be on its way
        count = len(prompts)
        request_here.zero_()
        request_here[:, :count] = torch.tensor([list(row) for row in rows])
        request.copy_(request_here, non_blocking=True)
        if isinstance(prompts, Tensor):
            prompt[:count, : prompts.shape[1]].copy_(prompts)
        else:
            for row, ids in enumerate(prompts):
                prompt_here[row, : len(ids)] = torch.frombuffer(array("q", ids), dtype=torch.int64)
            prompt[:count].copy_(prompt_here[:count], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class Chunk:
    """Some steps of a batch, on their way to the host."""

    def __init__(self, batch: Batch, start: int, end: int):
        fetched = [batch.chosen, batch.finite, *([] if batch.scores is None else [batch.scores])]
        self._tensors = [tensor[start:end].to("cpu", non_blocking=True) for tensor in fetched]
        self._arrived = torch.cuda.Event() if batch.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def steps(self) -> Iterator[Step]:
        """Wait for the device; then one after the other."""
        if self._arrived is not None:
            self._arrived.synchronize()
        tokens, finite, *scores = (tensor.tolist() for tensor in self._tensors)
        for index, ids in enumerate(tokens):
            yield Step(ids, finite[index], scores[0][index] if scores else None)


class Graphs:
    """CUDA graphs of some work each, captured when the work is needed again.

    What runs once is launched kernel by kernel: a capture would cost more. The second time it
    runs so as well, which loads all kernels, and is then captured; from then on it is replayed.
    """

    def __init__(self) -> None:
        self._uses: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def launch(self, name: Hashable, work: Callable[[], Tensor]) -> Tensor:
        """Do `work`, and return its result, which a replay puts where it was."""
        if name in self._graphs:
            graph, result = self._graphs[name]
            graph.replay()
            return result
        result = work()
        self._uses[name] += 1
        if self._uses[name] == 2:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._graphs[name] = graph, work()
        return result
