"""Modules that FullyShardedDataParallel wraps, which torch deprecates: new code wants fully_shard.

Only torch needs this tool: models of JAX are functions of their parameters.
"""
