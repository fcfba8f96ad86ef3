"""The same GPT-2 in plain PyTorch: the oracle of the fused model and the baseline it is timed by.

Written on its own: it shares the configuration with the fused model and no code. Attributes carry
the names of GPT-2's checkpoints; weights are (out, in) as in `nn.Linear`.
"""

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from minifused.config import GPTConfig


class TwinCache:
    """Keys and values of the positions seen so far, in buffers that are written in place.

    Attributes:
        keys, values: (n_layer, B, H, max_length, D), in the dtype and on the device of the weights.
        capacity: how many positions there are.
        length: how many of them are filled, the same for all rows.
    """

    def __init__(self, shape: tuple[int, ...], like: Tensor):
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self.capacity, self.length = shape[3], 0

    def reset(self) -> None:
        """Forget all positions."""
        self.length = 0

    def positions(self, count: int) -> Tensor:
        """Where the next `count` tokens of each row are: (count,) int64."""
        return torch.arange(self.length, self.length + count, device=self.keys.device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, scale: float
    ) -> Tensor:
        """Write (B, H, T, D) keys and values behind `length`, and attend to all there are."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        k, v = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        return causal_attention(q, k, v, dropout_p, scale)

    def advance(self, count: int) -> None:
        """Count the new positions, once all layers have written them."""
        self.length += count


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, scale: float | None = None
) -> Tensor:
    """Softmax attention in which the last query sees all keys, and each one before it one fewer.

    Args:
        q: (B, H, Tq, D). k, v: (B, H, Tk, D) with Tk >= Tq.
        scale: what scores are multiplied by; None is D**-0.5.
    """
    q_len, k_len = q.shape[2], k.shape[2]
    causal, visible = 1 < q_len == k_len, None
    if 1 < q_len < k_len:
        # is_causal would align the mask top-left, so a chunk needs the mask spelled out.
        visible = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).tril(k_len - q_len)
    return F.scaled_dot_product_attention(q, k, v, visible, dropout_p, causal, scale=scale)


class Attention(nn.Module):
    """Causal multi-head self-attention of one layer."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.n_head, self.layer = config.n_head, layer
        self.attn_pdrop, self.scale = config.attn_pdrop, config.attention_scale(layer)
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, cache: TwinCache | None = None) -> Tensor:
        """Attend from each position of x, (B, T, C), to those up to it, cached ones included."""
        qkv = self.c_attn(x)  # (B, T, 3 * C)
        q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.n_head)
        dropout_p = self.attn_pdrop if self.training else 0.0
        if cache is None:
            y = causal_attention(q, k, v, dropout_p, self.scale)  # (B, H, T, D)
        else:
            y = cache.attend(self.layer, q, k, v, dropout_p, self.scale)
        y = rearrange(y, "b h t d -> b t (h d)")
        return self.resid_dropout(self.c_proj(y))  # (B, T, C)


class MLP(nn.Module):
    """The two linear layers of one block, with the activation between them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation = config.activation
        self.c_fc = nn.Linear(config.n_embd, config.inner_dim)
        self.c_proj = nn.Linear(config.inner_dim, config.n_embd)
        self.dropout = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor) -> Tensor:
        """Map each position of x, (B, T, C), on its own."""
        x = self.c_fc(x)  # (B, T, inner_dim)
        if self.activation == "relu":
            x = F.relu(x)
        else:
            x = F.gelu(x, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cache: TwinCache | None = None) -> Tensor:
        """Return the residual stream after this layer, (B, T, C)."""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class Twin(nn.Module):
    """GPT-2 with its initialisation (Radford et al., 2019); runs in any float dtype."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self._initialise()

    @classmethod
    def from_weights(cls, config: GPTConfig, weights: dict[str, Tensor]) -> "Twin":
        """A twin for inference that holds `weights`, a `state_dict()`, and no copy of them."""
        with torch.device("meta"):
            twin = cls(config).eval()
        twin.load_state_dict(weights, assign=True)
        return twin.requires_grad_(False)

    def _initialise(self) -> None:
        # Each block adds to the residual stream twice: its variance would grow with the depth.
        residual_std = 0.02 * (2 * self.config.n_layer) ** -0.5
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                std = residual_std if name.endswith("c_proj.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def new_cache(self, batch_size: int, max_length: int) -> TwinCache:
        """An empty cache for `batch_size` rows of up to `max_length` positions."""
        c = self.config
        shape = (c.n_layer, batch_size, c.n_head, max_length, c.head_dim)
        return TwinCache(shape, like=self.wte.weight)

    def forward(
        self, tokens: Tensor, cache: TwinCache | None = None, last_only: bool = False
    ) -> Tensor:
        """Score each possible next token.

        Args:
            tokens: (B, T), int64. With a cache they continue at position `cache.length`.
            cache: from `new_cache`; holds the new positions too afterwards.
            last_only: score the last position alone.

        Returns:
            Logits, (B, T, vocab_size) or (B, 1, vocab_size); float64 if the weights are, otherwise
            float32, computed in the dtype of the weights.

        Raises:
            ValueError: there are more positions than the model or the cache has.
        """
        count = tokens.shape[1]
        end = count if cache is None else cache.length + count
        limit = self.config.n_positions
        if cache is not None:
            limit = min(limit, cache.capacity)
        if end > limit:
            raise ValueError(f"{end} positions, but the model or its cache ends at {limit}")
        positions = torch.arange(count, device=tokens.device)  # (T,)
        if cache is not None:
            positions = cache.positions(count)
        x = self.drop(self.wte(tokens) + self.wpe(positions))  # (B, T, C)
        for block in self.h:
            x = block(x, cache)
        if cache is not None:
            cache.advance(count)
        x = self.ln_f(x[:, -1:] if last_only else x)
        head = self.wte if self.config.tie_word_embeddings else self.lm_head
        logits = F.linear(x, head.weight)  # (B, T or 1, vocab_size)
        return logits if logits.dtype == torch.float64 else logits.float()
