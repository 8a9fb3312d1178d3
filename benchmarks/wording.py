"""What the README and the picture call settings and workloads."""

SETTINGS = {
    "torch": "torch, eager",
    "torch_compiled": "torch, compiled",
    "torch_ranks": "torch, {} processes (gloo)",
    "torch_coupled": "torch, a loss over the whole batch",
    "torch_optimizer": "torch, with the optimizer (AdamW)",
    "jax": "JAX, jitted",
    "jax_devices": "JAX, {} devices",
    "jax_optimizer": "JAX, the optimizer alone (Adam)",
}

WORKLOADS = {
    "tiny": "MLP, 12 layers of 64",
    "transformer": "transformer, 4 layers of 128",
    "wide": "MLP, 8 layers of 512",
    "pairs": "64 pairs, transformer of 4 layers",
    "many_pairs": "2,048 pairs, transformer of 2 layers",
    "tiny_pairs": "6 pairs, transformer of 1 layer",
    "gpt2": "GPT-2, 3 layers of 192",
    "vocabulary": "GPT-2's vocabulary, 3 layers of 192",
    "untied": "the same, untied",
    "large_transformer": "transformer, 4 layers of 512",
    "wide_bfloat16": "MLP, 8 layers of 512, bfloat16",
    "scanned": "MLP, 8 layers of 512, scanned",
    "matrices": "8 matrices of 1024 x 1024",
    "small": "8 matrices of 64 x 64",
    "leaves": "leaves of 16 elements",
}


def setting(key: str, ranks: int) -> str:
    """The words for a setting with so many replicas; its key if there are none."""
    return SETTINGS.get(key, key).format(ranks)


def framework(key: str) -> str:
    """The one that a setting is of, as it is spelled."""
    return "JAX" if key.startswith("jax") else "torch"


def workload(key: str) -> str:
    """The words for a workload; its key if there are none."""
    return WORKLOADS.get(key, key)
