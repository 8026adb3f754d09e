"""Named model shapes: published ones exactly, and small ones for tests and the CPU demo.

Sources: Radford et al. 2019 (GPT-2 medium); H2O-Danube3 and H2O-Danube technical reports (arXiv
2407.09276, 2401.16818) and the config files published with those models.
"""

from __future__ import annotations

import difflib

from models._config import Config, GPTConfig, LlamaConfig

_TABLE: dict[str, Config] = {
    # GPT-2 medium, 354.8 M parameters.
    "gpt345m": GPTConfig(
        vocab_size=50257, max_length=1024, n_layers=24, width=1024, n_heads=16, ff_width=4096, loss_chunk=256
    ),
    # H2O-Danube3-500M, 513.6 M parameters.
    "llama500m": LlamaConfig(
        vocab_size=32000,
        max_length=8192,
        n_layers=16,
        width=1536,
        n_heads=16,
        n_kv_heads=8,
        ff_width=4096,
        rope_theta=100_000.0,
        loss_chunk=512,
    ),
    # H2O-Danube-1.8B, 1831.2 M parameters. The published model looks back over a window of 4096 tokens;
    # with inputs of at most 4096 tokens that window hides nothing, so the shorter max_length here makes
    # the two models equal.
    "llama1p8b": LlamaConfig(
        vocab_size=32000,
        max_length=4096,
        n_layers=24,
        width=2560,
        n_heads=32,
        n_kv_heads=8,
        ff_width=6912,
        loss_chunk=512,
        remat=True,
    ),
    # Llama-3 style, 134.1 M and 551.3 M parameters: shapes are our choice (see `preset`).
    "llama134m": LlamaConfig(
        vocab_size=32000,
        max_length=2048,
        n_layers=12,
        width=768,
        n_heads=12,
        n_kv_heads=6,
        ff_width=2304,
        rope_theta=500_000.0,
        loss_chunk=512,
    ),
    "llama551m": LlamaConfig(
        vocab_size=32000,
        max_length=2048,
        n_layers=18,
        width=1536,
        n_heads=24,
        n_kv_heads=8,
        ff_width=4096,
        rope_theta=500_000.0,
        loss_chunk=512,
    ),
    # Byte-level (256 bytes and an end-of-text token), 1.0 M parameters, for two CPU cores: float32 because
    # CPUs have no fast bfloat16 products, and no loop over the four layers because XLA:CPU runs
    # straight-line code faster.
    "demo": LlamaConfig(
        vocab_size=257,
        max_length=128,
        n_layers=4,
        width=128,
        n_heads=4,
        n_kv_heads=2,
        ff_width=512,
        tied_head=True,
        dtype="float32",
        scan_unroll=4,
    ),
    "tiny": LlamaConfig(
        vocab_size=61,
        max_length=32,
        n_layers=2,
        width=32,
        n_heads=4,
        n_kv_heads=2,
        ff_width=64,
        dtype="float32",
    ),
    "tiny_gpt": GPTConfig(
        vocab_size=61, max_length=32, n_layers=2, width=32, n_heads=4, ff_width=128, dtype="float32"
    ),
}

PRESETS: tuple[str, ...] = tuple(_TABLE)


def preset(name: str) -> Config:
    """The config called `name`.

    =========  ==========  ==========================================================================
    name       parameters  what it is
    =========  ==========  ==========================================================================
    gpt345m    354.8 M     GPT-2 medium (papers call it 345M; its tensors hold 354,823,168 entries)
    llama500m  513.6 M     H2O-Danube3-500M
    llama1p8b  1831.2 M    H2O-Danube-1.8B
    llama134m  134.1 M     Llama-3 style; the literature gives only the size, the shape is our choice
    llama551m  551.3 M     Llama-3 style; the literature gives only the size, the shape is our choice
    demo       1.0 M       byte-level Llama for two CPU cores
    tiny       0.02 M      Llama for tests
    tiny_gpt   0.03 M      GPT for tests
    =========  ==========  ==========================================================================

    The two shapes of our choice have Llama 3's rotary base, grouped-query attention and head size 64, and a
    vocabulary of 32000: with Llama 3's own 128256 entries, embedding and head alone exceed 134 M parameters.
    """
    if name not in _TABLE:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"a model preset must be one of {list(PRESETS)}, got {name!r}.{hint}")
    return _TABLE[name]
