"""One folder a setting, one file a contender: NAME, SOURCE, AGAINST and `make`. See `benchmarks.registry`."""
