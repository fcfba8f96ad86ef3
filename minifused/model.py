"""GPT-2 on fused kernels: the model calls the operations and knows no kernel, device or backend.

Attributes carry the names of GPT-2's checkpoints; weights are (out, in) as in `nn.Linear`. The
residual stream is float32 whatever the dtype of the weights.
"""

from collections.abc import Iterable, Mapping

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from minifused import ops
from minifused.cache import KVCache
from minifused.config import GPTConfig

VOCAB_MULTIPLE = 64  # the head's rows are padded to this, and the pad never leaves the model


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)


class Affine(nn.Module):
    """Weight (N, K) and bias (N,) of a linear layer, or both (N,) of a layer norm.

    `sums` of a layer behind a norm come from both: see `ops.norm_sums`.
    """

    def __init__(self, *shape: int):
        super().__init__()
        self.sums: Tensor | None = None
        self.weight = _parameter(*shape)
        self.bias = _parameter(shape[0])

    def fold(self, norm: "Affine") -> None:
        self.sums = ops.norm_sums(norm.weight, norm.bias, self.weight, self.bias)


class Attention(nn.Module):
    """Causal multi-head self-attention of one layer, behind its layer norm."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.scale = config.attention_scale(layer)
        self.c_attn = Affine(3 * config.n_embd, config.n_embd)
        self.c_proj = Affine(config.n_embd, config.n_embd)

    def forward(
        self,
        x: ops.Stream,
        norm: tuple[Tensor, Tensor, float],
        then: Tensor,
        cache: KVCache | None,
    ) -> ops.Stream:
        """x (B, T, C) plus the attention of its layer norm; `then` is the next norm's weight."""
        c_attn, c_proj = self.c_attn, (self.c_proj.weight, self.c_proj.bias, then)
        if cache is None:
            sums = c_attn.sums
            qkv = ops.norm_linear(x, *norm, c_attn.weight, c_attn.bias, sums=sums)  # (B, T, 3 * C)
            qkv = rearrange(qkv, "b t (three h d) -> b t three h d", three=3, h=self.n_head)
            y = ops.attention(qkv, scale=self.scale)
        else:
            kv, start = (cache.keys[self.layer], cache.values[self.layer]), cache.lengths
            qkv = ops.norm_qkv(x, *norm, c_attn.weight, c_attn.bias, *kv, start, c_attn.sums)
            if qkv.shape[1] == 1:
                return ops.add_decode_attention(x, qkv, *kv, cache.ends, self.scale, *c_proj)
            y = self.attend(qkv, cache)
        return ops.add_linear(x, rearrange(y, "b t h d -> b t (h d)"), *c_proj)

    def attend(self, qkv: Tensor, cache: KVCache) -> Tensor:
        """Attention of packed qkv (B, T, 3, H, D) to itself and to what is cached before it."""
        if cache.longest == 0:
            return ops.attention(qkv, scale=self.scale)
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        return ops.attention(
            qkv[:, :, 0], keys, values, scale=self.scale, kv_lengths=cache.ends
        )  # fmt: skip


class MLP(nn.Module):
    """Two linear layers behind a layer norm, the first fused with its activation."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation = config.activation
        self.c_fc = Affine(config.inner_dim, config.n_embd)
        self.c_proj = Affine(config.n_embd, config.inner_dim)

    def forward(
        self, x: ops.Stream, norm: tuple[Tensor, Tensor, float], then: Tensor
    ) -> ops.Stream:
        """x (B, T, C) plus the MLP of its layer norm; `then` is the next norm's weight."""
        c_fc, c_proj = self.c_fc, self.c_proj
        y = ops.norm_linear(x, *norm, c_fc.weight, c_fc.bias, self.activation, c_fc.sums)
        return ops.add_linear(x, y, c_proj.weight, c_proj.bias, then)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.eps = config.layer_norm_epsilon
        self.ln_1 = Affine(config.n_embd)
        self.attn = Attention(config, layer)
        self.ln_2 = Affine(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: ops.Stream, then: Tensor, cache: KVCache | None = None) -> ops.Stream:
        """The residual stream after this layer; `then` is the weight of the norm behind it."""
        ln_1, ln_2 = self.ln_1, self.ln_2
        x = self.attn(x, (ln_1.weight, ln_1.bias, self.eps), ln_2.weight, cache)
        return self.mlp(x, (ln_2.weight, ln_2.bias, self.eps), then)


def _last_valid(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Row lengths[b] - 1 of each x[b], the last if None: (B, T, C) to (B, 1, C)."""
    if lengths is None:
        return x[:, -1:]
    last = (lengths - 1).clamp(min=0).long()  # (B,)
    return x.gather(1, last[:, None, None].expand(-1, 1, x.shape[2]))


class GPTModel(nn.Module):
    """GPT-2 for inference, in float32, float16 or bfloat16."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        padded = -(-config.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.wte = nn.ParameterDict({"weight": _parameter(padded, config.n_embd)})
        self.wpe = nn.ParameterDict({"weight": _parameter(config.n_positions, config.n_embd)})
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = Affine(config.n_embd)
        if not config.tie_word_embeddings:
            self.lm_head = nn.ParameterDict({"weight": _parameter(padded, config.n_embd)})
        self.head_sums: Tensor | None = None

    @classmethod
    def from_weights(
        cls,
        config: GPTConfig,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "GPTModel":
        """A model with the weights of a checkpoint or of the twin's `state_dict()`.

        Weights that come one by one, as from `checkpoint.iter_weights`, are never all held twice.
        """
        with torch.device("meta"):
            model = cls(config)
        state = {}
        for name, weight in weights.items() if isinstance(weights, Mapping) else weights:
            weight = weight.to(device=device, dtype=dtype)
            padding = -weight.shape[0] % VOCAB_MULTIPLE
            if padding and name in ("wte.weight", "lm_head.weight"):
                weight = F.pad(weight, (0, 0, 0, padding))
            state[name] = weight.contiguous()
        model.load_state_dict(state, assign=True)
        model.fold_norms()
        return model.requires_grad_(False).eval()

    @property
    def blocks(self) -> list[Block]:
        return [block for block in self.h if isinstance(block, Block)]

    @property
    def head(self) -> Tensor:
        """(padded vocabulary, C): one row of scores a token."""
        return (self.wte if self.config.tie_word_embeddings else self.lm_head)["weight"]

    @property
    def _head(self) -> tuple[Tensor, Tensor, float, Tensor]:
        """The layer norm behind the last layer, and the head's weight."""
        return self.ln_f.weight, self.ln_f.bias, self.config.layer_norm_epsilon, self.head

    def fold_norms(self) -> None:
        """Take from the weights, as they are now, what lets a step do without its layer norms."""
        for block in self.blocks:
            block.attn.c_attn.fold(block.ln_1)
            block.mlp.c_fc.fold(block.ln_2)
        self.head_sums = ops.norm_sums(self.ln_f.weight, self.ln_f.bias, self.head)

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """An empty cache for `batch_size` rows of up to `capacity` positions."""
        weight = self.wte["weight"]
        return KVCache(self.config, batch_size, capacity, weight.device, weight.dtype)

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        last_only: bool = False,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Score each possible next token.

        Args:
            tokens: (B, T), int64. With a cache each row goes on at its `cache.lengths`.
            cache: from `new_cache`; holds the new positions too afterwards.
            last_only: score the last position alone.
            lengths: (B,) int32, how many tokens of each row are valid, T if None; the others are
                padding at its end. A row of 0 stands still, and its scores mean nothing.

        Returns:
            Logits, float32, (B, T, vocab_size) or (B, 1, vocab_size).

        Raises:
            ValueError: there are more positions than the model or the cache has.
        """
        x, sums = self._stream(tokens, cache, last_only, lengths, advance=True), self.head_sums
        logits = ops.norm_linear(x, *self._head, sums=sums, out_dtype=torch.float32)
        return logits[..., : self.config.vocab_size]

    def last_scores(
        self, tokens: Tensor, cache: KVCache, lengths: Tensor, valid: int, advance: bool
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, of each row's last token: (B, V), and more columns than the vocabulary has.

        Args:
            valid: how many columns there are to choose from, the first ones.
            advance: count the cache's new positions; otherwise whoever calls does.

        Returns:
            The logits, and their peaks: see `ops.scores`.
        """
        x = self._stream(tokens, cache, True, lengths, advance)
        logits, peaks = ops.scores(x, *self._head, valid, self.head_sums)
        return logits[:, -1], peaks

    def _stream(
        self,
        tokens: Tensor,
        cache: KVCache | None,
        last_only: bool,
        lengths: Tensor | None,
        advance: bool,
    ) -> ops.Stream:
        """The residual stream behind the last layer."""
        self._require_room(tokens.shape[1], cache)
        blocks = self.blocks
        norms = [*(block.ln_1.weight for block in blocks), self.ln_f.weight]
        x = self._embed(tokens, cache, lengths, norms[0])
        for block, then in zip(blocks, norms[1:], strict=True):
            x = block(x, then, cache)
        if cache is not None and advance:
            count = tokens.shape[1]
            cache.advance(count if lengths is None else lengths, cache.longest + count)
        if last_only and tokens.shape[1] > 1:
            x = ops.Stream(_last_valid(x.x, lengths))
        return x

    def _embed(
        self, tokens: Tensor, cache: KVCache | None, lengths: Tensor | None, then: Tensor
    ) -> ops.Stream:
        weights = self.wte["weight"], self.wpe["weight"]
        if cache is None:
            starts = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
            return ops.embed(tokens, starts, *weights, norm_weight=then)
        if lengths is None or tokens.shape[1] > 1:
            torch.add(cache.lengths, tokens.shape[1], out=cache.ends)
            return ops.embed(tokens, cache.lengths, *weights, norm_weight=then)
        # A step of rows of which some may stand still, and then attend to nothing.
        return ops.embed(tokens, cache.lengths, *weights, lengths, cache.ends, then)

    def _require_room(self, count: int, cache: KVCache | None) -> None:
        limit, end = self.config.n_positions, count
        if cache is not None:
            limit, end = min(limit, cache.capacity), cache.longest + count
        if end > limit:
            raise ValueError(f"{end} positions, but the model or its cache ends at {limit}")
