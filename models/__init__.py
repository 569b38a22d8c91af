"""The decoder of the Llama family: weights only, no cache, no device code."""
