"""Modules whose wrapper reduces gradients: DDP, FSDP."""
