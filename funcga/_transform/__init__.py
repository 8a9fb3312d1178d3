"""Folds that are spread over calls: `multi_steps` and what belongs to it."""
