"""Each file here is a claim, measured in one run against what people write today."""
